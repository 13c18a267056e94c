"""Handlers that write through a connection of sqlite3 or psycopg, on the inbox's own transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads
from psycopg.types.numeric import FloatLoader
from sqlalchemy.orm import Session

from onceward import Onceward
from onceward.app.build import open_task, open_task_async
from onceward.db import SessionError
from onceward.errors import ConfigurationError
from onceward.inbox import InboxSession
from onceward.verify import examine_consumer, verify_consumer
from tests.support.orm_shop import Base, OrmShop, contract, order
from tests.support.schema import new_schema

ONCE = {"steps": {"process": {"retry": {"max_attempts": 1}}}}
ADD = "INSERT INTO customers (name) VALUES ({})"
NAMES = "SELECT name FROM customers ORDER BY name"


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[OrmShop]:
    made = OrmShop(f"sqlite:///{tmp_path}/shop.db", asynchronous=False)
    yield made
    made.engine.dispose()


@pytest.fixture
def on_postgresql(postgres_url: str) -> Iterator[OrmShop]:
    with new_schema(postgres_url) as schema:
        made = OrmShop(schema.plain_url, asynchronous=False)
        yield made
        made.engine.dispose()


def run(shop: OrmShop, body: Any, annotation: Any = sqlite3.Connection) -> str:
    """Process one event; return the error, if there is one."""
    app = Onceward("shop", database=shop.url)

    def take(payload: dict[str, Any], db: Any) -> None:
        body(db)

    take.__annotations__["db"] = annotation
    app.consumer("memory://drivers", contract=contract(), policy=ONCE)(take)
    with open_task(app, app.consumers["take"]) as task:
        return str(task.start_processing(order(1)).error or "")


@pytest.mark.req("IN-08")
def test_a_connection_of_sqlite3_writes_into_the_inboxs_transaction(shop: OrmShop) -> None:
    seen = []

    def write(db: sqlite3.Connection) -> None:
        assert isinstance(db, sqlite3.Connection)
        db.row_factory = sqlite3.Row
        db.execute(ADD.format("?"), ["ann"])
        cursor = db.cursor()
        cursor.executemany(ADD.format("?"), [["bob"], ["eve"]])
        seen.extend(row["name"] for row in db.execute(NAMES))
        assert cursor.connection is db

    assert run(shop, write) == ""
    assert seen == ["ann", "bob", "eve"]
    assert shop.rows(NAMES) == [("ann",), ("bob",), ("eve",)]
    assert shop.done() == 1


def _with(db: Any) -> None:
    with db:
        pass


MISUSES = {
    "commit()": lambda db: db.commit(),
    "rollback()": lambda db: db.rollback(),
    "close()": lambda db: db.close(),
    "`with connection:`": _with,
    "cursor.connection": lambda db: db.cursor().connection.commit(),
}
ONLY_SQLITE = {
    "executescript()": lambda db: db.executescript("SELECT 1"),
    "isolation_level": lambda db: setattr(db, "isolation_level", None),
    "cursor.executescript()": lambda db: db.cursor().executescript("SELECT 1"),
    "set_trace_callback()": lambda db: db.set_trace_callback(print),
}
ONLY_PSYCOPG = {
    "add_notice_handler()": lambda db: db.add_notice_handler(print),
    "adapters": lambda db: db.adapters.register_loader("numeric", FloatLoader),
    "set_json_loads": lambda db: set_json_loads(print, db),
    "cursor_factory": lambda db: setattr(db, "cursor_factory", psycopg.ClientCursor),
}


@pytest.mark.req("IN-08")
@pytest.mark.parametrize("name", [*MISUSES, *ONLY_SQLITE])
def test_a_connection_of_sqlite3_cannot_end_the_transaction(shop: OrmShop, name: str) -> None:
    def misuse(db: Any) -> None:
        db.execute(ADD.format("?"), ["ann"])
        with pytest.raises(SessionError):
            {**MISUSES, **ONLY_SQLITE}[name](db)

    assert "in test_driver_connections.py:" in run(shop, misuse)
    assert (shop.rows(NAMES), shop.done()) == ([], 0)


@pytest.mark.req("IN-08")
@pytest.mark.parametrize("name", [*MISUSES, *ONLY_PSYCOPG])
def test_a_connection_of_psycopg_cannot_end_the_transaction(on_postgresql: OrmShop, name: str) -> None:
    def misuse(db: Any) -> None:
        db.execute(ADD.format("%s"), ["ann"])
        with pytest.raises(SessionError):
            {**MISUSES, **ONLY_PSYCOPG}[name](db)

    assert "in test_driver_connections.py:" in run(on_postgresql, misuse, psycopg.Connection)
    assert (on_postgresql.rows(NAMES), on_postgresql.done()) == ([], 0)


@pytest.mark.req("IN-08")
def test_sql_that_ends_the_transaction_is_refused(shop: OrmShop, on_postgresql: OrmShop) -> None:
    for query in ("COMMIT", "/* so */ rollback"):
        assert "ends its transaction itself" in run(shop, lambda db, query=query: db.execute(query))
    for each in ("COMMIT", b"COMMIT", sql.SQL("COMMIT"), sql.Composed([sql.SQL("COM"), sql.SQL("MIT")])):
        error = run(on_postgresql, lambda db, each=each: db.cursor().execute(each), psycopg.Connection)
        assert "ends its transaction itself" in error
    assert shop.done() == on_postgresql.done() == 0


def _server_cursor(db: Any) -> None:
    with db.cursor("rows") as cursor:
        cursor.execute("SELECT 1; commit")


CAUGHT: dict[str, Any] = {
    "execute": lambda db: db.execute("; commit"),
    "executemany": lambda db: db.cursor().executemany("COMMIT", [()]),
}
CAUGHT_BY_PSYCOPG: dict[str, Any] = {
    "sql": lambda db: db.execute(sql.SQL("; commit")),
    "copy": lambda db: db.cursor().copy("commit").__enter__(),
    "stream": lambda db: list(db.cursor().stream("commit")),
    "server": _server_cursor,
    "client": lambda db: psycopg.ClientCursor(db).execute("commit"),
    "class": psycopg.Connection.commit,
}


@pytest.mark.req("IN-08")
def test_a_handler_that_catches_the_refusal_of_a_commit_has_failed(
    shop: OrmShop, on_postgresql: OrmShop
) -> None:
    ways = [(shop, sqlite3.Connection, each) for each in CAUGHT.values()]
    ways += [(on_postgresql, psycopg.Connection, each) for each in (CAUGHT | CAUGHT_BY_PSYCOPG).values()]
    for where, annotation, commit in ways:

        def catch(db: Any, commit: Any = commit) -> None:
            db.execute("INSERT INTO customers (name) VALUES ('ann')")
            with suppress(Exception):
                commit(db)

        assert "in test_driver_connections.py:" in run(where, catch, annotation)
        assert (where.rows(NAMES), where.done()) == ([], 0)


@pytest.mark.req("IN-08")
def test_blocks_of_psycopg_undo_what_they_are_asked_to(on_postgresql: OrmShop) -> None:
    def write(db: psycopg.Connection[Any]) -> None:
        with db.transaction():
            db.execute(ADD.format("'one'"))
            raise psycopg.Rollback
        with db.transaction(force_rollback=True):
            db.execute(ADD.format("'two'"))
        with db.transaction() as outer:
            db.execute(ADD.format("'three'"))
            with db.transaction():
                raise psycopg.Rollback(outer)
        with db.transaction():
            db.execute(ADD.format("'four'"))

    assert run(on_postgresql, write, psycopg.Connection) == ""
    assert on_postgresql.rows(NAMES) == [("four",)]


@pytest.mark.req("IN-08")
def test_a_connection_of_psycopg_writes_into_the_inboxs_transaction(on_postgresql: OrmShop) -> None:
    def write(db: psycopg.Connection[Any]) -> None:
        assert isinstance(db, psycopg.Connection)
        db.execute(ADD.format("%s"), ["ann"])
        with pytest.raises(psycopg.errors.UniqueViolation), db.transaction():
            db.execute(ADD.format("%s"), ["ann"])
        with db.cursor(row_factory=dict_row) as cursor:
            cursor.execute(NAMES)
            assert [row["name"] for row in cursor] == ["ann"]
            assert cursor.rowcount == 1

    assert run(on_postgresql, write, psycopg.Connection) == ""
    assert on_postgresql.rows(NAMES) == [("ann",)]


@pytest.mark.req("IN-08")
def test_what_a_cursor_of_psycopg_is_given_is_its_own(on_postgresql: OrmShop) -> None:
    seen = []

    def read(db: psycopg.Connection[Any]) -> None:
        assert sql.Literal("ann").as_string(db) == "'ann'"
        cursor = db.cursor()
        cursor.adapters.register_loader("numeric", FloatLoader)
        cursor.row_factory = dict_row
        seen.append(cursor.execute("SELECT 0.5 AS half").fetchone())
        seen.append(db.execute("SELECT 0.5 AS half").fetchone())

    assert run(on_postgresql, read, psycopg.Connection) == ""
    assert seen == [{"half": 0.5}, (Decimal("0.5"),)]
    assert type(seen[0]["half"]) is float


@pytest.mark.req("IN-08")
def test_a_caught_error_of_psycopg_fails_the_handler(on_postgresql: OrmShop) -> None:
    def swallow(db: psycopg.Connection[Any]) -> None:
        with pytest.raises(psycopg.errors.UndefinedTable):
            db.execute("SELECT * FROM nowhere")

    assert "aborted" in run(on_postgresql, swallow, psycopg.Connection)
    assert on_postgresql.done() == 0


@pytest.mark.req("IN-08")
def test_an_async_connection_of_psycopg_does_the_same(on_postgresql: OrmShop) -> None:
    app = Onceward("shop", database=on_postgresql.url)

    @app.consumer("memory://async-driver", contract=contract(), policy=ONCE)
    async def take(payload: dict[str, Any], db: psycopg.AsyncConnection) -> None:  # type: ignore[type-arg]
        await db.execute(ADD.format("%s"), [payload["name"]])
        with pytest.raises(psycopg.errors.UniqueViolation):
            async with db.transaction():
                await db.execute(ADD.format("%s"), [payload["name"]])
        async with db.cursor() as cursor:
            await cursor.execute(NAMES)
            assert (payload["name"],) in [row async for row in cursor]
        if payload["name"] == "eve":
            await db.commit()

    async def go() -> list[str]:
        async with open_task_async(app, app.consumers["take"]) as task:
            done = [await task.start_processing(order(n, name=name)) for n, name in enumerate(["ann", "eve"])]
        return [str(each.error or "") for each in done]

    fine, refused = asyncio.run(go())
    assert fine == ""
    assert "commit() in test_driver_connections.py:" in refused
    assert on_postgresql.rows(NAMES) == [("ann",)]


@pytest.mark.req("IN-08")
def test_a_connection_that_outlives_its_handler_is_refused(shop: OrmShop) -> None:
    kept: list[Any] = []
    assert run(shop, kept.append) == ""
    with pytest.raises(SessionError, match="has ended with its handler"):
        kept[0].execute("SELECT 1")


@pytest.mark.req("IN-08")
def test_a_connection_that_the_session_does_not_have_is_refused(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")

    def declare(function: Any, **more: Any) -> str:
        with pytest.raises(ConfigurationError) as refused:
            app.consumer("memory://refused", contract=contract(**more))(function)
        return str(refused.value)

    def other(payload: dict[str, Any], db: psycopg.Connection) -> None: ...  # type: ignore[type-arg]
    def own(payload: dict[str, Any], db: sqlite3.Connection) -> None: ...
    async def in_asyncio(payload: dict[str, Any], db: sqlite3.Connection) -> None: ...

    assert "the database of the app is sqlite" in declare(other)
    assert "mode='effectful'" in declare(own, mode="effectful")
    assert "annotate sqlalchemy.ext.asyncio.AsyncSession" in declare(in_asyncio)


proven = Onceward("proven", database="sqlite:///proven-driver.db")


@proven.consumer("memory://proven-driver", contract=contract(consumer_id="proven-driver"))
def honest(payload: dict[str, Any], db: sqlite3.Connection, orm: Session, session: InboxSession) -> None:
    db.execute("INSERT INTO customers (name) VALUES (?)", [f"customer {payload['id']}"])


@pytest.mark.long
@pytest.mark.req("IN-07")
def test_verify_proves_a_handler_with_a_drivers_connection() -> None:
    verify_consumer(honest, events=[order(1), order(2)], setup=Base.metadata.create_all)


@proven.consumer("memory://hiding", contract=contract(consumer_id="hiding"))
def hides_the_drivers_error(payload: dict[str, Any], db: sqlite3.Connection) -> None:
    with suppress(sqlite3.OperationalError):
        db.execute(ADD.format("?"), [str(payload["id"])])


on_server = Onceward("on-server", database="postgresql://localhost/never-opened")


@on_server.consumer("memory://hiding-psycopg", contract=contract(consumer_id="hiding-psycopg"))
async def hides_the_error_of_psycopg(payload: dict[str, Any], db: psycopg.AsyncConnection[Any]) -> None:
    with suppress(psycopg.OperationalError):
        async with db.transaction():
            await db.execute(ADD.format("%s"), [str(payload["id"])])


@pytest.mark.usual("hides_the_error_of_psycopg")
@pytest.mark.req("IN-07")
@pytest.mark.parametrize("handler", [hides_the_drivers_error, hides_the_error_of_psycopg])
def test_verify_fails_statements_with_an_error_of_the_driver(handler: Any, postgres_url: str) -> None:
    report = examine_consumer(
        handler,
        events=[order(1)],
        setup=Base.metadata.create_all,
        only=["exceptions"],
        database=None if handler is hides_the_drivers_error else postgres_url,
    )
    assert "was swallowed" in str(report["exceptions"]), str(report)


@on_server.consumer("memory://copying", contract=contract(consumer_id="copying"))
def copies(payload: dict[str, Any], db: psycopg.Connection[Any]) -> None:
    with db.cursor() as cursor:
        with cursor.copy("COPY customers (name) FROM STDIN") as rows:
            rows.write_row([f"customer {payload['id']}"])
        assert list(cursor.stream("SELECT 1")) == [(1,)]


@on_server.consumer("memory://copying-async", contract=contract(consumer_id="copying-async"))
async def copies_async(payload: dict[str, Any], db: psycopg.AsyncConnection[Any]) -> None:
    async with db.cursor() as cursor:
        async with cursor.copy("COPY customers (name) FROM STDIN") as rows:
            await rows.write_row([f"customer {payload['id']}"])
        assert [row async for row in cursor.stream("SELECT 1")] == [(1,)]


@pytest.mark.req("IN-07", "IN-08")
@pytest.mark.parametrize("handler", [copies, copies_async])
def test_a_copy_of_psycopg_is_a_write_of_the_handler(handler: Any, postgres_url: str) -> None:
    report = verify_consumer(
        handler,
        events=[order(1)],
        setup=Base.metadata.create_all,
        only=["clean", "every-type", "exceptions", "outside-calls"],
        database=postgres_url,
    )
    assert "at 6 boundaries" in report["exceptions"].note
