"""A handler that blocks the event loop keeps the leases of its batch: nothing of it runs twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
import redis.asyncio
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import AsyncConsumerTask, Transaction
from onceward.connectors.memory import AsyncMemoryConnector
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector
from onceward.connectors.sqlite import AsyncSqliteConnector, SqliteConnector
from onceward.deadletters import AsyncDeadLetters
from onceward.deadletters.source import AsyncWithDeadLetters
from onceward.testing.clock import FakeClock
from onceward.transaction import Settlement, Verdict
from tests.support.pending_entries import age
from tests.support.wait import until
from tests.support.world import SettlingSource, consuming, transactions

pytestmark = pytest.mark.timeout(120)

LEASE = 6.0


class Guarded(SettlingSource):
    """A source that notes what is extended from a thread."""

    def __init__(self, given: list[Transaction], lease: float) -> None:
        super().__init__(given, lease=lease)
        self.from_thread: list[list[str]] = []
        self.threads: set[int] = set()
        self.failing = 0

    def extend_from_thread(self, given: Any) -> None:
        self.threads.add(threading.get_ident())
        self.from_thread.append([each.id for each in given])
        if len(self.from_thread) <= self.failing:
            raise OSError("not now")


def consume(source: Any, block: Any) -> Any:
    class Blocking(AsyncConsumerTask):
        async def process_transaction(self, transaction: Transaction) -> None:
            block(transaction)

    return asyncio.run(Blocking({"source": source}).consume_transactions(consuming(batch=3)))


@pytest.mark.req("CE-36")
def test_leases_are_extended_from_a_thread_while_the_event_loop_is_blocked() -> None:
    source = Guarded(transactions(3), lease=0.6)

    def block(transaction: Transaction) -> None:
        end = time.monotonic() + 60
        while transaction.id == "t1" and len(source.from_thread) < 3 and time.monotonic() < end:
            time.sleep(0.01)

    report = consume(source, block)
    assert report.succeeded == 3
    assert {"t1", "t2"} <= set(source.from_thread[0])
    assert threading.get_ident() not in source.threads


@pytest.mark.req("CE-36")
def test_an_extension_that_fails_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    source = Guarded(transactions(1), lease=0.6)
    source.failing = 2

    def block(_: Transaction) -> None:
        end = time.monotonic() + 60
        while len(source.from_thread) < 4 and time.monotonic() < end:
            time.sleep(0.01)

    assert consume(source, block).succeeded == 1
    assert caplog.text.count("leases could not be extended while the event loop is blocked: not now") == 2


def test_a_loop_that_is_not_blocked_does_it_by_itself() -> None:
    source = Guarded(transactions(3), lease=60.0)
    consume(source, lambda _: None)
    assert source.from_thread == []


def test_the_thread_ends_with_its_call() -> None:
    consume(Guarded(transactions(1), lease=0.6), lambda _: None)
    until(lambda: all(each.name != "onceward-leases" for each in threading.enumerate()))


def extend_while_blocked(connector: Any, given: Any) -> None:
    """Extend from another thread, while this one holds the event loop."""
    raised: list[BaseException] = []

    def extend() -> None:
        try:
            connector.extend_from_thread([*given, *transactions(1, start=99)])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=extend)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert raised == []


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_lease_that_was_extended_from_a_thread_holds(kind: str, tmp_path: Path) -> None:
    clock = FakeClock(1000.0)

    async def main() -> list[Any]:
        connector: Any = (
            AsyncMemoryConnector(clock=clock, lease=LEASE)
            if kind == "memory"
            else AsyncSqliteConnector(tmp_path / "q.db", clock=clock, lease=LEASE)
        )
        async with connector:
            await connector.dispatch_transactions_async(transactions(2))
            held = await connector.fetch_transactions_async(2)
            clock.advance(LEASE * 0.9)
            extend_while_blocked(connector, held)
            clock.advance(LEASE * 0.9)
            if kind == "sqlite":
                with SqliteConnector(tmp_path / "q.db", clock=clock) as other:
                    return list(other.fetch_transactions(2))
            return list(await connector.fetch_transactions_async(2))

    assert asyncio.run(main()) == []


@pytest.fixture
def stream(redis_url: str) -> Iterator[tuple[redis.Redis, str]]:
    with redis.Redis.from_url(redis_url) as client:
        yield client, f"test:{uuid4().hex}"


@pytest.mark.parametrize("given", ["url", "client"])
def test_the_idle_time_of_a_stream_is_restarted_from_a_thread(
    redis_url: str, stream: tuple[redis.Redis, str], given: str
) -> None:
    client, name = stream

    async def main() -> None:
        address: Any = redis_url if given == "url" else redis.asyncio.Redis.from_url(redis_url)
        async with AsyncRedisStreamsConnector(address, name, lease=60.0) as connector:
            await connector.dispatch_transactions_async(transactions(2))
            held = await connector.fetch_transactions_async(2)
            age(client, name, 40.0)
            extend_while_blocked(connector, held)

    asyncio.run(main())
    pending = client.xpending_range(name, "onceward", "-", "+", 10)
    assert len(pending) == 2
    assert all(each["time_since_delivered"] < 40_000 for each in pending)


def test_an_outcome_that_is_being_recorded_is_not_taken_for_a_lost_lease(
    redis_url: str, stream: tuple[redis.Redis, str], caplog: pytest.LogCaptureFixture
) -> None:
    client, name = stream

    async def main() -> None:
        async with AsyncRedisStreamsConnector(redis_url, name, lease=60.0) as connector:
            await connector.dispatch_transactions_async(transactions(2))
            held = await connector.fetch_transactions_async(2)
            done = [Settlement(each, Verdict.DONE) for each in held]
            settling = asyncio.ensure_future(connector.settle_transactions_async(done))
            while client.xpending(name, "onceward")["pending"]:  # the reply is not read yet
                await asyncio.sleep(0)
            extend_while_blocked(connector, held)
            await settling

    asyncio.run(main())
    assert "too late" not in caplog.text


def test_a_source_inside_dead_letters_has_it_too() -> None:
    clock = FakeClock(1000.0)

    async def main() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        queue = AsyncMemoryConnector(clock=clock, lease=LEASE)
        source = AsyncWithDeadLetters(queue, AsyncDeadLetters(engine), consumer="billing")
        await queue.dispatch_transactions_async(transactions(1))
        held = await queue.fetch_transactions_async(1)
        clock.advance(LEASE * 0.9)
        extend_while_blocked(source, held)
        clock.advance(LEASE * 0.9)
        assert not await queue.fetch_transactions_async(1)
        await engine.dispose()

    asyncio.run(main())
