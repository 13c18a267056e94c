"""An async generator that a handler leaves before its end: its `finally` runs before the commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward import AsyncConsumerTask, Transaction
from onceward.connectors.memory import AsyncMemoryConnector
from onceward.db.handlers import async_attempts
from onceward.inbox import AsyncInbox, Event
from onceward.task.work import OutcomeStatus
from tests.support.databases import Database
from tests.support.inbox.contracts import contract

pytestmark = pytest.mark.req("CC-062")

EVENT = {"tracking_id": "e1", "event_type": "paid", "created_at": "2026-03-01T00:00:00Z", "payload": 3}
INSERT = "INSERT INTO bills VALUES ('e1')"


class Refused(Exception): ...


async def rows(session: Any, error: type[Exception] | None = None) -> AsyncIterator[int]:
    try:
        yield 1
        yield 2
    finally:
        await asyncio.sleep(0.01)
        await session.execute(INSERT)
        if error is not None:
            raise error


async def leaves(_: Any, session: Any) -> None:
    async for _ in rows(session):
        break


async def leaves_in_a_task(_: Any, session: Any) -> None:
    await asyncio.create_task(leaves(_, session))


async def leaves_a_nested_one(_: Any, session: Any) -> None:
    async def outer() -> AsyncIterator[int]:
        async for each in rows(session):
            yield each

    async for _ in outer():
        break


async def leaves_one_that_fails(_: Any, session: Any) -> None:
    async for _ in rows(session, Refused):
        break


async def waits_for_what_it_left(_: Any, session: Any) -> None:
    lock = asyncio.Lock()

    async def guarded() -> AsyncIterator[int]:
        async with lock:
            yield 1

    async for _ in guarded():
        break
    async with lock:
        await session.execute(INSERT)


async def fails_itself(_: Any, session: Any) -> None:
    async for _ in rows(session):
        break
    raise Refused


RIGHT = [leaves, leaves_in_a_task, leaves_a_nested_one, waits_for_what_it_left]
WRONG = [leaves_one_that_fails, fails_itself]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database("sqlite", "asyncio", f"sqlite:///{tmp_path}/test.db")
    database.do("CREATE TABLE bills (id TEXT)")
    yield database
    database.close()


def bills(database: Database) -> int:
    return int(database.scalar("SELECT count(*) FROM bills"))


@pytest.mark.parametrize("handler", [*RIGHT, *WRONG])
@pytest.mark.parametrize("mode", ["transactional", "effectful"])
def test_of_an_inbox(database: Database, handler: Any, mode: str) -> None:
    inbox, promised = AsyncInbox(database.default), contract(mode=mode)
    database.run(inbox.migrate())
    database.run(inbox.register(promised))
    process = inbox.process(promised, Event.of(EVENT), handler)
    if handler in RIGHT:
        database.run(process)
    else:
        with pytest.raises(Refused):
            database.run(process)
    assert bills(database) == (handler in RIGHT)


@pytest.mark.parametrize("handler", [leaves, leaves_one_that_fails])
def test_under_the_engine(database: Database, handler: Any) -> None:
    inbox, promised = AsyncInbox(database.default), contract()
    database.run(inbox.migrate())
    database.run(inbox.register(promised))
    body = {"contract": promised, "process_transaction": staticmethod(handler)}
    task: Any = type("Task", (AsyncConsumerTask,), body)
    made = task({"source": AsyncMemoryConnector()}, {"inbox": inbox})
    outcome = database.run(
        made.start_processing(Transaction(id="e1", payload=3, metadata={"event_type": "paid"}))
    )
    assert (outcome.status is OutcomeStatus.SUCCEEDED) == (handler in RIGHT)
    assert bills(database) == (handler in RIGHT)


def test_of_a_queue_or_a_boundary(database: Database) -> None:
    attempt = async_attempts(leaves, database.default)
    assert database.run(attempt(None)) is None
    assert bills(database) == 1
