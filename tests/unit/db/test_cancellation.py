"""An attempt that runs out of time cancels the statement it waits for, and its session can only be rolled back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest

from onceward import Transaction
from onceward.db import AsyncDbSession, DbSession
from onceward.task.exceptions import AttemptInterrupted, ExceptionCategory
from onceward.task.mixins.utils import cancel_requested, run_with_timeout
from tests.support.wait import until
from tests.support.world import ListSource, World, consuming, retry, transactions, within
from tests.unit.db.test_interrupts import in_threads

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

INSERT = "INSERT INTO orders (id) VALUES (:id)"
SLOW = {
    "sqlite": """
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000000000)
        SELECT count(*) FROM n
    """,
    "postgresql": "SELECT pg_sleep(60)",
}


@pytest.fixture(autouse=True)
def _orders(database: Database) -> None:
    database.do("CREATE TABLE orders (id INTEGER PRIMARY KEY)")


def consume(database: Database, handle: Any, attempts: int = 2) -> Any:
    """A consumer whose handler gets a session, with a limit of half a second for each attempt."""
    world = World("threads")
    engine = database.engine()

    def process(given: Transaction) -> Any:
        with DbSession(engine) as session:
            return handle(session)

    task = world.consumer(process, exception=lambda *_: None, source=ListSource(transactions(1)))
    began = time.monotonic()
    report = within(30, world.consume, task, consuming(process=retry(attempts, timeout=0.5)))
    assert time.monotonic() - began < 25
    return report


@in_threads
@pytest.mark.req("CE-43")
def test_a_statement_is_canceled_at_the_deadline_and_its_transaction_rolled_back(database: Database) -> None:
    tried: list[int] = []

    def handle(session: DbSession) -> None:
        tried.append(len(tried))
        session.execute(INSERT, {"id": len(tried)})
        session.fetch_one(SLOW[database.name])

    report = consume(database, handle)
    assert tried == [0, 1]
    assert (report.timed_out, report.stuck) == (2, 0)
    assert report.failed_by_category[ExceptionCategory.TIMEOUT] == 1
    assert database.scalar("SELECT count(*) FROM orders") == 0


@pytest.mark.parametrize("database", [("postgresql", "threads")], indirect=True, ids=["postgresql"])
@pytest.mark.req("CE-43")
def test_a_commit_is_canceled_at_the_deadline(database: Database) -> None:
    """What a constraint trigger does at the commit can take long as well."""
    database.do(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(60); RETURN NULL; END $$"
    )
    database.do(
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    report = consume(database, lambda session: session.execute(INSERT, {"id": 1}), attempts=1)
    assert (report.timed_out, report.stuck) == (1, 0)
    assert database.scalar("SELECT count(*) FROM orders") == 0


@in_threads
@pytest.mark.req("CE-43")
def test_after_the_deadline_there_is_no_statement_and_no_commit(database: Database) -> None:
    raised: list[BaseException] = []

    def handle(session: DbSession) -> str:
        session.execute(INSERT, {"id": 1})
        until(cancel_requested)
        for _ in range(2):
            try:
                session.execute(INSERT, {"id": 2})
            except AttemptInterrupted as error:
                raised.append(error)
        return "as if nothing had happened"

    report = consume(database, handle, attempts=1)
    assert len(raised) == 2
    assert report.failed_by_category[ExceptionCategory.TIMEOUT] == 1
    assert database.scalar("SELECT count(*) FROM orders") == 0


@in_threads
@pytest.mark.req("CE-43")
def test_a_late_attempt_that_only_returns_commits_nothing(database: Database) -> None:
    def handle(session: DbSession) -> None:
        session.execute(INSERT, {"id": 1})
        until(cancel_requested)

    consume(database, handle, attempts=1)
    assert database.scalar("SELECT count(*) FROM orders") == 0


@in_threads
@pytest.mark.req("CE-43")
def test_no_session_is_opened_after_the_deadline(database: Database) -> None:
    engine = database.engine()
    ends: list[BaseException] = []

    def late() -> None:
        until(cancel_requested)
        try:
            with DbSession(engine):
                pass
        except BaseException as error:
            ends.append(error)

    with pytest.raises(TimeoutError):
        run_with_timeout(late, 0.1)
    until(lambda: ends)
    assert isinstance(ends[0], AttemptInterrupted)


@in_threads
@pytest.mark.req("CE-43")
def test_the_connection_of_a_canceled_statement_disturbs_nobody(database: Database) -> None:
    """Canceled again and again, on a pool of one connection, beside statements that must not be hit."""
    engine = database.engine(pool_size=1, max_overflow=0) if not database.is_sqlite else database.engine()

    def slow() -> None:
        with DbSession(engine) as session:
            session.fetch_one(SLOW[database.name])

    for _ in range(5):
        with pytest.raises(TimeoutError):
            run_with_timeout(slow, 0.2)
        for number in range(20):
            with DbSession(engine) as session:
                assert session.execute_scalar("SELECT 1 + :n", {"n": number}) == number + 1


in_asyncio = pytest.mark.parametrize(
    "database",
    [("sqlite", "asyncio"), ("postgresql", "asyncio")],
    indirect=True,
    ids=["sqlite", "postgresql"],
)


@in_asyncio
@pytest.mark.req("CE-43")
def test_in_asyncio_a_statement_is_canceled_with_the_task_that_waits_for_it(database: Database) -> None:
    """The driver for SQLite runs it in a thread, to its end unless it is interrupted."""
    engine = database.engine()

    async def slow() -> None:
        async with AsyncDbSession(engine) as session:
            await session.execute(INSERT, {"id": 1})
            await session.fetch_one(SLOW[database.name])

    async def cut_off() -> None:
        async with asyncio.timeout(0.2):
            await slow()

    with pytest.raises(TimeoutError):
        within(30, database.run, cut_off())
    assert database.scalar("SELECT count(*) FROM orders") == 0


@in_asyncio
@pytest.mark.req("CE-43")
def test_in_asyncio_an_attempt_that_swallows_its_cancellation_commits_nothing(database: Database) -> None:
    world = World("asyncio")

    async def process(task: Any, given: Transaction) -> str:
        async with AsyncDbSession(database.engine()) as session:
            await session.execute(INSERT, {"id": 1})
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)
        return "as if nothing had happened"

    task = world.consumer()
    type(task).process_transaction = process
    ended = within(
        30, world.run, task.start_processing, Transaction(id="t0"), consuming(process=retry(1, timeout=0.5))
    )
    assert ended.error.category is ExceptionCategory.TIMEOUT
    assert database.scalar("SELECT count(*) FROM orders") == 0
