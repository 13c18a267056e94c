"""A session on PostgreSQL leaves nothing on its connection, which others get next."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from onceward import Onceward
from onceward.app.build import open_task
from onceward.db.statement import refusal
from tests.support.orm_shop import OrmShop, contract, order
from tests.support.schema import new_schema

STAYS = {
    "SET search_path = tenant": "SET LOCAL",
    "set session statement_timeout to 0": "SET LOCAL",
    "/* a tenant */ SET ROLE tenant": "SET LOCAL",
    "SET TIME ZONE 'UTC'": "SET LOCAL",
    "RESET ALL": "TO DEFAULT",
    "SELECT set_config('search_path', 'tenant', false)": "true as the last argument",
    "SELECT set_config('search_path', 'tenant', 'false')": "true as the last argument",
    "SELECT set_config('search_path', 'tenant', NULL)": "true as the last argument",
    "SELECT set_config('search_path', 'tenant', NOT true)": "true as the last argument",
    "SELECT set_config('a.b', coalesce(:b, lower('B')), false), (true)": "true as the last argument",
    "SELECT set_config('a.b', 'c', true), set_config('a.d', 'e', false)": "true as the last argument",
    "UPDATE pg_settings SET setting = 'tenant' WHERE name = 'search_path'": "SET LOCAL",
    "SELECT 1 FROM a WHERE pg_try_advisory_lock(1)": "advisory_lock",
    "SELECT pg_advisory_lock_shared(1)": "advisory_lock",
    "CREATE TEMP TABLE basket (item text)": "ON COMMIT DROP",
    "create local temporary table basket as select 1": "ON COMMIT DROP",
    "CREATE OR REPLACE TEMP VIEW v AS SELECT 1": "ON COMMIT DROP",
    "SELECT 1 AS a INTO TEMP basket": "ON COMMIT DROP",
    "SELECT 1 AS a INTO pg_temp.basket": "ON COMMIT DROP",
    "CREATE TABLE IF NOT EXISTS pg_temp.basket (item text)": "ON COMMIT DROP",
    "CREATE OR REPLACE FUNCTION pg_temp.one() RETURNS int RETURN 1": "ON COMMIT DROP",
    "EXPLAIN (ANALYZE) CREATE TEMP TABLE basket AS SELECT 1": "ON COMMIT DROP",
    "LISTEN sales": "a connection of your own",
    "PREPARE one AS SELECT 1": "the driver prepares",
    "DECLARE c CURSOR WITH HOLD FOR SELECT 1": "WITH HOLD",
}
ENDS = [
    "SET LOCAL search_path = tenant, public",
    "SET TRANSACTION READ ONLY",
    "SET CONSTRAINTS ALL DEFERRED",
    "SELECT set_config('search_path', 'tenant', true)",
    "SELECT set_config('a.b', concat('(', :b, lower('B')), TRUE)",
    "SELECT set_config(%(name)s::VARCHAR, %(value)s::VARCHAR, %(local)s)",
    "SELECT set_config('a.b', 'c', :local) FROM a WHERE b = false",
    "SELECT 'SET search_path', 'pg_advisory_lock(1)'",
    "UPDATE a SET reset = 1",
    "SELECT pg_advisory_xact_lock(1)",
    "CREATE TEMP TABLE basket (item text) ON COMMIT DROP",
    "CREATE TABLE pg_temp.basket (item text) ON COMMIT DROP",
    "CREATE INDEX items ON pg_temp.basket (item)",
    "CREATE TABLE kept AS SELECT * FROM pg_temp.basket",
    "INSERT INTO pg_temp.basket SELECT 1",
    "WITH a AS (SELECT 1) INSERT INTO pg_temp.basket SELECT * FROM a",
    "INSERT INTO temp SELECT 1",
    "WITH a AS (SELECT 1) INSERT  INTO temp SELECT * FROM a",
    "DECLARE c CURSOR FOR SELECT 1",
    "NOTIFY sales",
]


@pytest.mark.req("IN-25")
@pytest.mark.parametrize("statement", STAYS)
def test_what_would_stay_on_the_connection_is_refused(statement: str) -> None:
    why = refusal(statement, "postgresql")
    assert why is not None
    assert "would stay on the connection" in why
    assert STAYS[statement] in why
    assert refusal(statement, "sqlite") is None


@pytest.mark.req("IN-25")
@pytest.mark.parametrize("statement", ENDS)
def test_what_ends_with_the_transaction_runs(statement: str) -> None:
    assert refusal(statement, "postgresql") is None


@pytest.mark.req("IN-25")
@pytest.mark.parametrize(
    ("taken", "mode"),
    [*((taken, "transactional") for taken in ("session", "orm", "driver")), ("session", "effectful")],
)
def test_a_handler_leaves_no_search_path_to_others(taken: str, mode: Any, postgres_url: str) -> None:
    with new_schema(postgres_url) as schema:
        shop = OrmShop(schema.plain_url, asynchronous=False)
        app = Onceward("shop", database=shop.url)
        how: Any = {"contract": contract(mode=mode), "name": "take"}
        how["policy"] = {"steps": {"process": {"retry": {"max_attempts": 1}}}}

        if taken == "session":

            @app.consumer("memory://q", **how)
            def with_session(payload: dict[str, Any], session: Any) -> None:
                session.execute(payload["sql"])
        elif taken == "orm":

            @app.consumer("memory://q", **how)
            def with_orm(payload: dict[str, Any], db: Session) -> None:
                db.execute(text(payload["sql"]))
        else:

            @app.consumer("memory://q", **how)
            def with_driver(payload: dict[str, Any], db: psycopg.Connection) -> None:  # type: ignore[type-arg]
                db.execute(payload["sql"])

        local = "SET LOCAL search_path = pg_catalog"
        with open_task(app, app.consumers["take"]) as task:
            done = [
                task.start_processing(order(number, sql=sql))
                for number, sql in enumerate(["SET search_path = pg_catalog", local, "SELECT 1"])
            ]
        refused, local_one, following = (str(each.error) for each in done)
        assert "would stay on the connection" in refused
        # In effectful mode, the statements that record the event as done come after the handler's.
        assert "onceward_" in local_one if mode == "effectful" else local_one == "None"
        assert following == "None"
        assert shop.done() == (1 if mode == "effectful" else 2)
        shop.engine.dispose()
