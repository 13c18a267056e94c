"""Statements of the session that do something outside its transaction are found, and not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine

from onceward import AsyncConsumerTask, ConsumerTask, Onceward, Transaction
from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from tests.verification.consumers import EVENTS, INSERT, contract, setup
from tests.verification.consumers import values as values_of

pytestmark = pytest.mark.req("CC-087")


class Escapes(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values_of(transaction))
        self.escape(session, self.services["statement"])

    def escape(self, session: Any, statement: str) -> None:
        session.execute(statement)


class EscapesOnTheConnection(Escapes):
    def escape(self, session: Any, statement: str) -> None:
        session.run(lambda own: own.connection.exec_driver_sql(statement))


class EscapesInTheDriver(Escapes):
    def escape(self, session: Any, statement: str) -> None:
        session.run(lambda own: own.connection.connection.cursor().execute(statement))


class EscapesAsynchronously(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute(INSERT, values_of(transaction))
        await session.execute(self.services["statement"])


def examine(consumer: Any, statement: str, database: str | None) -> VerificationReport:
    return examine_consumer(
        consumer,
        EVENTS[:1],
        setup=setup,
        services={"statement": statement},
        database=database,
        only=["outside-calls"],
    )


@pytest.mark.usual("Escapes")
@pytest.mark.parametrize(
    "consumer",
    [
        Escapes,
        EscapesOnTheConnection,
        EscapesInTheDriver,
        pytest.param(EscapesAsynchronously, marks=pytest.mark.long),
    ],
)
def test_a_program_on_the_server_is_found_and_not_started(
    consumer: Any, postgres_url: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    report = examine(consumer, f"COPY (SELECT 1) TO PROGRAM 'touch {tmp_path}/started'", postgres_url)
    finding = str(report["outside-calls"])
    assert (
        f"runs a program on the database server: COPY (SELECT 1) TO PROGRAM 'touch {tmp_path}"[:80] in finding
    )
    assert f"{Path(__file__).name}:" in finding
    assert "neither rolled back nor kept from happening twice" in finding
    assert not list(tmp_path.iterdir())


def test_a_notification_belongs_to_the_transaction(postgres_url: str) -> None:
    report = examine(Escapes, "SELECT pg_notify('orders', 'new')", postgres_url)
    assert report.passed, str(report)


def test_so_does_not_a_file_that_a_handler_attaches(tmp_path: Path) -> None:
    class Attaches(Escapes):
        def escape(self, session: Any, statement: str) -> None:
            session.execute(f"ATTACH DATABASE '{tmp_path}/archive.db' AS archive")
            session.execute("CREATE TABLE IF NOT EXISTS archive.bills (id TEXT)")
            session.execute("INSERT INTO archive.bills VALUES ('1')")

    finding = examine(Attaches, "", None)["outside-calls"]
    assert finding.result is ScenarioStatus.FAILED
    assert "writes to the attached database 'archive'" in str(finding)


@pytest.mark.usual("sets a sequence", "SELECT 'setval(1)'")
@pytest.mark.req("CC-142")
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT setval('pg_temp.s', 5) WHERE false", "sets a sequence"),
        ("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE false", "acts on the database server"),
        ("DO $$ BEGIN PERFORM set_config('my.last', 'x', false); END $$", "outlives the transaction"),
        ("DO $a$ BEGIN IF true THEN SET search_path = public; END IF; END $a$", "outlives the transaction"),
        ("DO $$ BEGIN PERFORM set_config('my.last', 'x', true); SET LOCAL work_mem = '4MB'; END $$", None),
        ("SELECT 'setval(1)'", None),
    ],
)
def test_what_no_rollback_undoes_is_found_also_in_a_block(
    statement: str, expected: str | None, postgres_url: str
) -> None:
    result = examine(Escapes, statement, postgres_url)["outside-calls"]
    assert result.result is (ScenarioStatus.FAILED if expected else ScenarioStatus.PASSED), str(result)
    assert expected is None or expected in str(result)


LASTING = "it outlives the transaction on its connection"


@pytest.mark.usual("SELECT pg_advisory_lock(7)", "can lose the commit", "SET LOCAL statement_timeout = 5000")
@pytest.mark.req("CC-103")
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("CREATE TEMP TABLE IF NOT EXISTS seen (id TEXT)", LASTING),
        pytest.param("SELECT 1 AS one INTO TEMPORARY seen", LASTING, marks=pytest.mark.long),
        ("SET statement_timeout = 5000", LASTING),
        ("SELECT set_config('app.tenant', 'a', false)", LASTING),
        ("SELECT pg_advisory_lock(7)", LASTING),
        pytest.param("PREPARE seen AS SELECT 1", LASTING, marks=pytest.mark.long),
        ("LISTEN orders", LASTING),
        ("SET LOCAL synchronous_commit = off", "can lose the commit"),
        ('SET LOCAL "synchronous_commit" TO off', "can lose the commit"),
        ("UPDATE pg_settings SET setting = '4MB' WHERE name = 'work_mem'", LASTING),
        pytest.param(
            "SELECT set_config('synchronous_commit', 'local', true)",
            "can lose the commit",
            marks=pytest.mark.long,
        ),
        ("SELECT pg_logical_emit_message(false, 'mail', 'x')", "outside the session's transaction"),
        ("CREATE TEMP TABLE seen ON COMMIT DROP AS SELECT 1", None),
        ("SET LOCAL statement_timeout = 5000", None),
        pytest.param(
            "SELECT set_config('app.tenant', coalesce(NULL, 'a'), true)", None, marks=pytest.mark.long
        ),
        ("SELECT pg_advisory_xact_lock(7)", None),
        pytest.param("SET LOCAL synchronous_commit = on", None, marks=pytest.mark.long),
        pytest.param("SET CONSTRAINTS ALL DEFERRED", None, marks=pytest.mark.long),
        ("CREATE UNLOGGED TABLE IF NOT EXISTS seen (id TEXT)", "empties an unlogged table"),
    ],
)
def test_what_outlives_the_transaction_on_its_connection_is_found(
    statement: str, expected: str | None, postgres_url: str
) -> None:
    # Sessions refuse most of them.
    report = examine(EscapesInTheDriver, statement, postgres_url)
    assert report["outside-calls"].result is (ScenarioStatus.FAILED if expected else ScenarioStatus.PASSED)
    assert expected is None or expected in str(report["outside-calls"])


@pytest.mark.usual("PRAGMA cache_size = 10", "PRAGMA user_version")
@pytest.mark.req("CC-103")
@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("CREATE TEMP TABLE IF NOT EXISTS seen (id TEXT)", True),
        ("CREATE TABLE IF NOT EXISTS temp.seen (id TEXT)", True),
        ("PRAGMA cache_size = 10", True),
        ("PRAGMA table_info(bills)", False),
        ("PRAGMA user_version", False),
    ],
)
def test_so_it_is_on_sqlite(statement: str, found: bool) -> None:
    result = examine(Escapes, statement, None)["outside-calls"]
    assert (LASTING in str(result)) is found


@pytest.mark.req("CC-103")
def test_a_temporary_table_that_the_handler_drops_is_none() -> None:
    class Drops(Escapes):
        def escape(self, session: Any, statement: str) -> None:
            session.execute("CREATE TEMP TABLE seen (id TEXT)")
            session.execute("DROP TABLE seen")

    report = examine(Drops, "", None)
    assert report.passed, str(report)


OWN = "writes to a table of onceward"


@pytest.mark.usual(
    "DELETE FROM onceward_dedup WHERE processed_at < 1000", "SELECT count(*) FROM onceward_dedup"
)
@pytest.mark.req("CC-151")
@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("DELETE FROM onceward_dedup WHERE processed_at < 1000", True),
        ("UPDATE main.onceward_effects SET state = 'done' WHERE 1 = 0", True),
        ('WITH old AS (SELECT 1) DELETE FROM "onceward_attempts" WHERE 1 = 0', True),
        ("SELECT count(*) FROM onceward_dedup", False),
        ("INSERT INTO bills SELECT 'x', 1 FROM onceward_dedup WHERE 1 = 0", False),
    ],
)
def test_a_write_to_the_records_of_the_inbox_is_found(statement: str, found: bool) -> None:
    result = examine(Escapes, statement, None)["outside-calls"]
    assert result.result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED), str(result)
    assert (OWN in str(result)) is found


class BindsValues(Escapes):
    def escape(self, session: Any, statement: str) -> None:
        values = self.services["values"]
        session.fetch_all(statement, dict(zip("abc", values, strict=False)))


app = Onceward("shop", database="postgresql://localhost/shop")


@app.service(outside=False)
def statement() -> str:
    return ""


@app.service(outside=False)
def values() -> list[Any]:
    return []


@app.consumer("memory://bound", contract=contract(event_types=["*"]))
def bind_in_the_driver(order: dict[str, Any], db: psycopg.Connection[Any], statement, values) -> None:  # type: ignore[no-untyped-def]
    db.execute("INSERT INTO bills VALUES ('1', %s)", [order["total"]])
    db.execute(statement, values)


SET, NAMED = "SELECT set_config(:a, :b, :c) AS x", "SELECT set_config(%s, %s, %s)"
FOREIGN = (
    "CREATE FOREIGN DATA WRAPPER elsewhere",
    "CREATE SERVER other FOREIGN DATA WRAPPER elsewhere",
    "CREATE FOREIGN TABLE remote_bills (id TEXT) SERVER other",
)


def with_foreign_table(engine: Engine) -> None:
    setup(engine)
    with engine.begin() as connection:
        for each in FOREIGN:
            connection.exec_driver_sql(each)


@pytest.mark.usual("values1", "values3")
@pytest.mark.req("CC-163")
@pytest.mark.parametrize(
    ("consumer", "statement", "values", "expected"),
    [
        (BindsValues, SET, ["app.tenant", "a", True], None),
        (BindsValues, SET, ["app.tenant", "a", False], LASTING),
        (BindsValues, SET, ["synchronous_commit", "off", True], "can lose the commit"),
        (bind_in_the_driver, NAMED, ["app.tenant", "a", True], None),
        (bind_in_the_driver, NAMED, ["app.tenant", "a", False], LASTING),
        (bind_in_the_driver, "INSERT INTO remote_bills VALUES (%s)", ["1"], "writes to the foreign table"),
    ],
)
def test_bound_values_count_and_so_do_statements_of_the_driver(
    consumer: Any, statement: str, values: list[Any], expected: str | None, postgres_url: str
) -> None:
    result = examine_consumer(
        consumer,
        EVENTS[:1],
        setup=with_foreign_table,
        services={"statement": statement, "values": values},
        database=postgres_url,
        only=["outside-calls"],
    )["outside-calls"]
    assert result.result is (ScenarioStatus.FAILED if expected else ScenarioStatus.PASSED), str(result)
    assert expected is None or expected in str(result)
