"""What a handler does beside the tables of the setup: tables that it creates, statements on a connection of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import connect
from sqlalchemy import Engine, event, text

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from tests.verification.consumers import EVENTS, INSERT, contract, setup, values

pytestmark = pytest.mark.req("CC-064")


def examine(consumer: Any, *only: str, **given: Any) -> VerificationReport:
    return examine_consumer(consumer, **{"events": EVENTS[:2], "setup": setup, "only": only, **given})


def failure_of(report: VerificationReport, scenario: str) -> str:
    assert report[scenario].result is ScenarioStatus.FAILED, str(report)
    return str(report[scenario])


class Writes(ConsumerTask):
    """A correct consumer that does `more`."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))
        self.more(transaction, session)

    def more(self, transaction: Transaction, session: Any) -> None: ...


def services(engine: Any) -> dict[str, Any]:
    return {"database": engine}


# ── tables that the handler creates ─────────────────────────────────────────────────────────────────────


class CreatesATable(Writes):
    def more(self, transaction: Transaction, session: Any) -> None:
        session.execute("CREATE TABLE IF NOT EXISTS audit (id TEXT)")
        session.execute("INSERT INTO audit VALUES (:id)", {"id": transaction.id})


class CreatesItOnTheSide(Writes):
    """On a connection of its own, so it is neither rolled back nor kept from happening twice."""

    def more(self, transaction: Transaction, session: Any) -> None:
        with self.services["database"].connect().execution_options(isolation_level="AUTOCOMMIT") as own:
            own.execute(text("CREATE SCHEMA IF NOT EXISTS aside"))
            own.execute(text("CREATE TABLE IF NOT EXISTS aside.audit (id TEXT)"))
            own.execute(text("INSERT INTO aside.audit VALUES (:id)"), {"id": transaction.id})


class WritesChanceThere(Writes):
    def more(self, transaction: Transaction, session: Any) -> None:
        session.execute("CREATE TABLE IF NOT EXISTS audit (id TEXT, at TEXT DEFAULT CURRENT_TIMESTAMP)")
        session.execute("INSERT INTO audit (id) VALUES (:id)", {"id": os.urandom(4).hex()})


def test_their_rows_are_compared() -> None:
    report = examine(WritesChanceThere)
    assert "exclude=['audit.id']" in failure_of(report, "clean")
    assert "audit.at" in report.not_compared
    report = examine(CreatesATable, "duplicates", "order", "state")
    assert report.passed, str(report)


def test_also_in_another_schema_and_without_a_trace_in_the_next_run(postgres_url: str) -> None:
    given = {"database": postgres_url, "services": services, "events": EVENTS[:1]}
    report = examine(CreatesItOnTheSide, "exceptions", **given)
    assert "aside.audit: 1 row too many: {id: 'order-1'}" in failure_of(report, "exceptions")
    report = examine(CreatesATable, "duplicates", **given)
    assert report.passed, str(report)


def test_a_write_to_an_attached_database_is_found(tmp_path: Path) -> None:
    other = tmp_path / "other.db"

    class WritesToBoth(Writes):
        def more(self, transaction: Transaction, session: Any) -> None:
            session.execute("INSERT INTO other.audit VALUES (:id)", {"id": transaction.id})

    class ReadsFromBoth(Writes):
        def more(self, transaction: Transaction, session: Any) -> None:
            session.fetch_all("SELECT * FROM other.audit")

    def attach(engine: Engine) -> dict[str, Any]:
        def on_connect(connection: Any, _: Any) -> None:
            connection.execute(f"ATTACH DATABASE '{other}' AS other")
            connection.execute("CREATE TABLE IF NOT EXISTS other.audit (id TEXT)")

        event.listen(engine, "connect", on_connect)
        return {}

    assert examine(ReadsFromBoth, "every-type", services=attach).passed
    finding = failure_of(examine(WritesToBoth, services=attach, events=EVENTS[:1]), "clean")
    assert "event 'order-1' wrote to other.audit, in the attached database 'other'" in finding


# ── statements on a connection of its own ───────────────────────────────────────────────────────────────


class Notifies(Writes):
    def more(self, transaction: Transaction, session: Any) -> None:
        with self.services["database"].connect().execution_options(isolation_level="AUTOCOMMIT") as own:
            own.execute(text("SELECT pg_notify('orders', :id)"), {"id": transaction.id})


class AsyncNotifies(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute(INSERT, values(transaction))
        async with self.services["database"].connect() as own:
            await own.execution_options(isolation_level="AUTOCOMMIT")
            await own.execute(text("SELECT pg_notify('orders', :id)"), {"id": transaction.id})


class Connects(Writes):
    def more(self, transaction: Transaction, session: Any) -> None:
        with connect(self.services["dsn"], autocommit=True) as own:
            own.execute("SELECT pg_notify('orders', 'one')")


class UsesAnOpenConnection(Writes):
    def more(self, transaction: Transaction, session: Any) -> None:
        self.services["open"].execute(psycopg.sql.SQL("SELECT pg_notify('orders', 'one')"))


class Looks(Writes):
    """Reading on another connection is harmless, and a notification through the session commits with it."""

    def more(self, transaction: Transaction, session: Any) -> None:
        with self.services["database"].connect() as own:
            own.execute(text("SELECT count(*) FROM bills WHERE lower(id) = 'a'"))
        self.services["open"].execute("SELECT max(total) FROM bills")
        session.execute("SELECT pg_notify('orders', :id)", {"id": transaction.id})


@pytest.mark.usual("Connects", "Looks")
@pytest.mark.parametrize(
    ("consumer", "words"),
    [
        (Notifies, "ran a statement outside the session: SELECT pg_notify('orders'"),
        (AsyncNotifies, "ran a statement outside the session: SELECT pg_notify('orders'"),
        (Connects, "opened another database connection"),
        (UsesAnOpenConnection, "ran a statement outside the session: SELECT pg_notify('orders', 'one')"),
        (Looks, None),
    ],
)
def test_on_another_connection_only_reading_is_allowed(
    consumer: Any, words: str | None, postgres_url: str
) -> None:
    def given(engine: Any) -> dict[str, Any]:
        dsn = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        lets = {"database": engine, "dsn": dsn}
        if consumer in (UsesAnOpenConnection, Looks):
            lets["open"] = psycopg.connect(dsn, autocommit=True)
        return lets

    report = examine(consumer, "outside-calls", database=postgres_url, services=given, events=EVENTS[:1])
    if words is None:
        assert report.passed, str(report)
    else:
        assert words in failure_of(report, "outside-calls")


class WritesNoNumber(Writes):
    def more(self, transaction: Transaction, session: Any) -> None:
        session.execute("CREATE TABLE IF NOT EXISTS rates (rate double precision, exact numeric)")
        session.execute("INSERT INTO rates VALUES ('NaN', 'NaN')")


def test_what_is_not_a_number_equals_itself(postgres_url: str) -> None:
    report = examine(WritesNoNumber, "clean", database=postgres_url)
    assert report["clean"].result is ScenarioStatus.PASSED, str(report)
