"""A write that is never awaited: the attempt fails before its commit, under the engine, in an inbox and in a queue."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.connectors.memory import AsyncMemoryConnector, MemoryConnector
from onceward.db.handlers import async_attempts, attempts
from onceward.inbox import AsyncInbox, Event, Inbox
from onceward.task.exceptions import UnawaitedError
from tests.support.inbox.contracts import contract

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)
pytestmark = [
    pytest.mark.req("CC-062"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

EVENT = {"tracking_id": "e1", "event_type": "paid", "created_at": "2026-03-01T00:00:00Z", "payload": 3}
INSERT = "INSERT INTO bills VALUES ('e1')"


async def notify() -> None: ...


async def forgets_a_write(event: Event, session: Any) -> None:
    await session.execute(INSERT)
    session.execute("INSERT INTO bills VALUES ('and another')")


async def forgets_an_effect(event: Event, session: Any) -> None:
    await session.execute(INSERT)
    session.effect("charge", lambda key: notify())


def forgets_in_threads(event: Event, session: Any) -> None:
    session.execute(INSERT)
    notify()


async def awaits(event: Event, session: Any) -> None:
    await session.execute(INSERT)


def writes(event: Event, session: Any) -> None:
    session.execute(INSERT)


def wrong_handlers(database: Database) -> list[Any]:
    return [forgets_a_write, forgets_an_effect] if database.asynchronous else [forgets_in_threads]


@pytest.fixture
def database(sqlite: Database) -> Iterator[Database]:
    sqlite.do("CREATE TABLE bills (id TEXT)")
    yield sqlite
    gc.collect()


@pytest.fixture
def inbox(database: Database) -> Any:
    made: Any = (AsyncInbox if database.asynchronous else Inbox)(database.default)
    run(database, made.migrate)
    return made


def run(database: Database, call: Any, *args: Any) -> Any:
    return database.run(call(*args)) if database.asynchronous else call(*args)


def bills(database: Database) -> int:
    return int(database.scalar("SELECT count(*) FROM bills"))


@pytest.mark.parametrize("mode", ["transactional", "effectful"])
def test_an_inbox_commits_nothing_and_the_event_can_be_processed_later(
    database: Database, inbox: Any, mode: str
) -> None:
    promised = contract(mode=mode)
    run(database, inbox.register, promised)
    for wrong in wrong_handlers(database):
        with pytest.raises(
            UnawaitedError, match=r"(execute|effect|notify)\(…\) at .*test_unawaited_writes.py:\d+ was"
        ):
            run(database, inbox.process, promised, Event.of(EVENT), wrong)
        assert bills(database) == 0
    run(database, inbox.process, promised, Event.of(EVENT), awaits if database.asynchronous else writes)
    assert bills(database) == 1


def test_the_engine_commits_nothing(database: Database, inbox: Any) -> None:
    promised = contract()
    run(database, inbox.register, promised)
    base: Any = AsyncConsumerTask if database.asynchronous else ConsumerTask
    source = AsyncMemoryConnector() if database.asynchronous else MemoryConnector()
    transaction = Transaction(id="e1", payload=3, metadata={"event_type": "paid"})
    for wrong in wrong_handlers(database):
        body = {"contract": promised, "process_transaction": staticmethod(wrong)}
        task = type("Task", (base,), body)({"source": source}, {"inbox": inbox})
        outcome = run(database, task.start_processing, transaction)
        assert isinstance(outcome.error.cause, UnawaitedError)
        assert bills(database) == 0


def test_a_handler_of_a_queue_or_a_boundary_commits_nothing(database: Database) -> None:
    made: Any = async_attempts if database.asynchronous else attempts
    for wrong in wrong_handlers(database)[:1]:
        attempt = made(wrong, database.default)(None)
        assert isinstance(database.run(attempt), UnawaitedError)
        assert bills(database) == 0
