"""What is particular to Redis Streams: recovery, trimming, histories, clients, lost connections, and the engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis
import redis.asyncio

from onceward import AsyncConsumerTask, ConsumerTask, ProducerTask, Transaction
from onceward.connectors import BurialReason
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.settlement import Settlement, Verdict
from onceward.task.exceptions import ConfigurationError, FetchException, TransactionException
from onceward.testing.servers import Server, redis_server
from tests.world import consuming, retry


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as made:
        yield made


@pytest.fixture
def stream() -> str:
    return f"test:{uuid4().hex}"


def numbered(count: int) -> list[Transaction]:
    return [Transaction(id=f"t{number}", payload=number) for number in range(count)]


def age(client: redis.Redis, stream: str, seconds: float) -> None:
    """Make every pending entry look as if it had been delivered so much earlier."""
    for each in client.xpending_range(stream, "onceward", "-", "+", 1000):
        client.xclaim(
            stream,
            "onceward",
            each["consumer"],
            0,
            [each["message_id"]],
            idle=each["time_since_delivered"] + int(seconds * 1000),
            retrycount=each["times_delivered"],
            justid=True,
        )


class Collect(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        self.services["seen"].append(transaction.id)


# ── recovery ────────────────────────────────────────────────────────────────────────────────────────────


def test_entries_of_a_killed_process_come_back_by_themselves(redis_url: str, stream: str) -> None:
    script = f"""
        from onceward.connectors.redis_streams import RedisStreamsConnector
        connector = RedisStreamsConnector({redis_url!r}, {stream!r}, lease=0.5)
        print(len(connector.fetch_transactions(10)), flush=True)
        import time; time.sleep(60)
    """
    with RedisStreamsConnector(redis_url, stream, lease=0.5) as connector:
        connector.dispatch_transactions(numbered(5))
        victim = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"5\n"
        victim.kill()
        victim.communicate()
        assert connector.fetch_transactions(10) == []
        deadline = time.monotonic() + 20
        recovered: list[Transaction] = []
        while len(recovered) < 5 and time.monotonic() < deadline:
            recovered += connector.fetch_transactions(10)
            time.sleep(0.05)
        assert sorted(each.id for each in recovered) == ["t0", "t1", "t2", "t3", "t4"]


def test_while_new_entries_keep_coming_recovered_ones_are_a_bounded_share(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(200))
        connector.fetch_transactions(100)
        age(client, stream, 61)
        connector._queue._recover_at = 0.0
        batch = connector.fetch_transactions(40)
        old = [each for each in batch if each.payload < 100]
        assert len(batch) == 40
        assert len(old) == 10


def test_the_history_of_failures_is_kept_with_the_dead_letter(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    with RedisStreamsConnector(redis_url, stream, max_deliveries=2) as connector:
        connector.dispatch_transactions(numbered(1))
        for text in ("first", "second"):
            [fetched] = connector.fetch_transactions(1)
            error = TransactionException(text, "SYSTEM", fetched.id)
            connector.settle_transactions([Settlement(fetched, Verdict.FAILED, error)])
            age(client, stream, 61)
        [letter] = connector.dead_letters()
        assert (letter.reason, letter.deliveries, letter.category) == (
            BurialReason.MAX_DELIVERIES,
            2,
            "SYSTEM",
        )
        [(_, fields)] = client.xrange(connector._queue.dead)
        history = [json.loads(line) for line in fields[b"history"].splitlines()]
        assert [(each["delivery"], each["error"]) for each in history] == [
            (1, "SYSTEM [t0]: first"),
            (2, "SYSTEM [t0]: second"),
        ]
        assert client.hlen(connector._queue.history) == 0
        assert client.xpending(stream, "onceward")["pending"] == 0


def test_an_entry_whose_body_was_trimmed_is_reported_and_cleared(
    redis_url: str, stream: str, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(3))
        connector.fetch_transactions(3)
        age(client, stream, 61)
        client.xtrim(stream, maxlen=1, approximate=False)
        assert [each.id for each in connector.fetch_transactions(10)] == ["t2"]
        assert [letter.reason for letter in connector.dead_letters()] == [BurialReason.TRIMMED] * 2
        assert sum("trimmed" in record.getMessage() for record in caplog.records) == 2
        assert client.xpending(stream, "onceward")["pending"] == 1


def test_an_entry_of_somebody_else_becomes_a_dead_letter(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    client.xadd(stream, {"foo": "bar"})
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(1))
        assert [each.id for each in connector.fetch_transactions(10)] == ["t0"]
        assert [letter.reason for letter in connector.dead_letters()] == [BurialReason.UNDECODABLE]


def test_counts_say_where_messages_are(redis_url: str, stream: str) -> None:
    with RedisStreamsConnector(redis_url, stream, redelivery_delay=30) as connector:
        connector.dispatch_transactions(numbered(6))
        first, second, third, _ = connector.fetch_transactions(4)
        error = TransactionException("later")
        connector.settle_transactions(
            [
                Settlement(first, Verdict.DONE),
                Settlement(second, Verdict.FAILED, error),
                Settlement(third, Verdict.FAILED, TransactionException("no", "BUSINESS")),
            ]
        )
        assert connector.counts() == {"ready": 2, "leased": 1, "delayed": 1, "dead": 1}


# ── streams, groups and clients ─────────────────────────────────────────────────────────────────────────


def test_a_stream_deleted_while_consuming_is_made_again(
    redis_url: str, stream: str, client: redis.Redis
) -> None:
    with RedisStreamsConnector(redis_url, stream) as connector:
        connector.dispatch_transactions(numbered(1))
        connector.fetch_transactions(1)
        client.delete(stream)
        assert connector.fetch_transactions(1) == []
        connector.dispatch_transactions(numbered(1))
        assert len(connector.fetch_transactions(1)) == 1


def test_many_connectors_that_start_at_once_make_one_group(redis_url: str, stream: str) -> None:
    connectors = [RedisStreamsConnector(redis_url, stream) for _ in range(8)]
    threads = [threading.Thread(target=each.fetch_transactions, args=(1,)) for each in connectors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connectors[0].dispatch_transactions(numbered(8))
    taken = [each.id for connector in connectors for each in connector.fetch_transactions(3)]
    assert sorted(taken) == [f"t{number}" for number in range(8)]
    for connector in connectors:
        connector.close()


@pytest.mark.parametrize("decoded", [True, False])
def test_any_client_will_do_and_stays_as_it_was(redis_url: str, stream: str, decoded: bool) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=decoded) as given:
        with RedisStreamsConnector(given, stream) as connector:
            connector.dispatch_transactions([Transaction(id="t0", payload=b"\xff")])
            [fetched] = connector.fetch_transactions(1)
            assert fetched.payload == b"\xff"
        assert given.set(stream + ":still-mine", "x")
        assert isinstance(given.get(stream + ":still-mine"), str if decoded else bytes)


def test_a_client_of_the_other_kind_is_refused(redis_url: str) -> None:
    with pytest.raises(ConfigurationError, match="redis URL"):
        RedisStreamsConnector(redis.asyncio.Redis.from_url(redis_url), "orders")
    with pytest.raises(ConfigurationError, match="redis URL"):
        AsyncRedisStreamsConnector(redis.Redis.from_url(redis_url), "orders")


@pytest.mark.parametrize("settings", [{"stream": ""}, {"group": ""}, {"maxlen": 0}, {"lease": 0}])
def test_settings_that_cannot_work_are_refused_by_name(redis_url: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        RedisStreamsConnector(redis_url, **{"stream": "orders", **settings})


def test_maxlen_trims_what_is_dispatched(redis_url: str, stream: str, client: redis.Redis) -> None:
    with RedisStreamsConnector(redis_url, stream, maxlen=100) as connector:
        for _ in range(20):
            connector.dispatch_transactions(numbered(100))
    assert client.xlen(stream) < 1000


def test_a_cancelled_fetch_gives_back_what_it_took(redis_url: str, stream: str) -> None:
    async def main() -> int:
        async with AsyncRedisStreamsConnector(redis_url, stream) as connector:
            await connector.dispatch_transactions_async(numbered(5))
            for _ in range(20):
                fetching = asyncio.create_task(connector.fetch_transactions_async(5))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                fetching.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
            return len(await connector.fetch_transactions_async(5))

    assert asyncio.run(main()) == 5


# ── under the engine ────────────────────────────────────────────────────────────────────────────────────


def test_the_engines_produce_and_consume_on_it(redis_url: str, stream: str, client: redis.Redis) -> None:
    class Send(ProducerTask):
        def produce_transaction(self, transaction: Transaction) -> None:
            self.connectors["out"].dispatch_transactions([transaction])

    seen: list[str] = []
    with RedisStreamsConnector(redis_url, stream) as connector:
        assert Send({"out": connector}).produce_transactions(numbered(250)).succeeded == 250
        task = Collect({"source": connector}, {"seen": seen})
        assert task.consume_transactions(consuming(batch=100, concurrency=8)).succeeded == 250
    assert sorted(seen) == sorted(each.id for each in numbered(250))
    assert client.xpending(stream, "onceward")["pending"] == 0


def test_the_asyncio_engine_consumes_on_it(redis_url: str, stream: str) -> None:
    seen: list[str] = []

    class AsyncCollect(AsyncConsumerTask):
        async def process_transaction(self, transaction: Transaction) -> None:
            seen.append(transaction.id)

    async def main() -> int:
        async with AsyncRedisStreamsConnector(redis_url, stream) as connector:
            await connector.dispatch_transactions_async(numbered(250))
            report = await AsyncCollect({"source": connector}).consume_transactions(
                consuming(batch=100, concurrency=32, mode="continuous")
            )
            return report.succeeded

    assert asyncio.run(main()) == 250
    assert len(set(seen)) == 250


@pytest.fixture
def durable_redis() -> Iterator[Server]:
    with redis_server(durable=True) as server:
        yield server


def test_a_lost_connection_surfaces_as_a_fetch_exception(durable_redis: Server) -> None:
    with RedisStreamsConnector(durable_redis.url, "orders") as connector:
        connector.dispatch_transactions(numbered(1))
        durable_redis.kill()
        task = Collect({"source": connector}, {"seen": []})
        with pytest.raises(FetchException) as raised:
            task.consume_transactions(consuming())
        assert isinstance(raised.value.cause, redis.ConnectionError)


def test_the_loop_works_again_after_redis_returns_when_the_policy_allows_it(durable_redis: Server) -> None:
    seen: list[str] = []
    with RedisStreamsConnector(durable_redis.url, "orders", lease=2.0) as connector:
        connector.dispatch_transactions(numbered(300))

        class Slow(ConsumerTask):
            def process_transaction(self, transaction: Transaction) -> None:
                seen.append(transaction.id)
                if len(seen) == 50:
                    durable_redis.kill()
                    threading.Timer(0.5, durable_redis.start).start()
                if len(set(seen)) == 300:
                    self.stop()

        policy = consuming(
            batch=20,
            fetch=retry(200, backoff=0.05, backoff_multiplier=1),
            streaming=True,
            timeout=60,
            empty_queue={"backoff": 0.05, "backoff_cap": 0.2},
        )
        report = Slow({"source": connector}).consume_transactions(policy)
        assert report.stop_reason == "stopped"
        assert report.retries > 0
        assert set(seen) == {each.id for each in numbered(300)}
        assert connector.counts()["dead"] == 0
