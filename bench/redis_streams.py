"""The engines on Redis Streams, against plain redis-py loops of the same commands."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

import redis
import redis.asyncio

from bench.idle import Stops, idle
from bench.measure import Line, compare, ratio
from onceward import AsyncConsumerTask, AsyncProducerTask, ConsumerTask, Onceward, Transaction
from onceward.connectors.codec import encode
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.run.outages import AsyncKeeper, keeper_of
from onceward.run.progress import ORDER
from onceward.run.scoreboard import FIELDS
from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from onceward.testing.servers import redis_server
from onceward.transaction import Verdict

COUNT = 20_000
BATCH = 100
ROUNDS = 10
"""More than usual: each involves two processes, so a busy machine spoils more of them."""
IN_FLIGHT = 250
"""Entries in flight at once when producing, for both."""
ORDERS = [Transaction(id=f"order-{number}", payload={"order": number}) for number in range(COUNT)]
BODIES = [encode(each) for each in ORDERS]


class NoOp(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        return None


class AsyncNoOp(AsyncConsumerTask):
    async def process_transaction(self, transaction: Transaction) -> None:
        return None


class Send(AsyncProducerTask):
    async def produce_transaction(self, transaction: Transaction) -> None:
        await self.connectors["out"].dispatch_transactions_async([transaction])


def lines() -> Iterator[Line]:
    with redis_server() as server:
        bench = OnRedis(server.url)
        yield ratio(
            "Redis, asyncio, batch 100, concurrency 32",
            compare(COUNT, bench.plain_async, bench.engine_async, prepare=bench.fill, rounds=ROUNDS),
            at_most=1 / 0.5,
        )
        yield ratio(
            "Redis, threads, batch 100, concurrency 32",
            compare(COUNT, bench.plain, bench.engine, prepare=bench.fill, rounds=ROUNDS),
            at_most=1 / 0.35,
        )
        for kind in ("threads", "asyncio"):
            plain = bench.plain if kind == "threads" else bench.plain_async
            yield ratio(
                f"Redis, {kind}, a worker of onceward run, default policy",
                compare(COUNT, plain, partial(bench.worker, kind), prepare=bench.fill, rounds=ROUNDS),
                at_most=1 / 0.6,
            )
        yield ratio(
            "Redis, producer engine, 20,000 entries",
            compare(COUNT, bench.plain_produce, bench.engine_produce, prepare=bench.clear, rounds=ROUNDS),
            at_most=1 / 0.5,
        )
        yield from bench.idle()


class OnRedis:
    def __init__(self, url: str) -> None:
        self.url = url
        self.client = redis.Redis.from_url(url)
        self.policy = ConsumerPolicy.model_validate(
            {"loop": {"batch": {"size": BATCH}, "concurrency": {"value": 32}, "mode": "continuous"}}
        )
        self.stream = ""

    def clear(self) -> None:
        self.client.flushall()
        self.stream = uuid.uuid4().hex

    def fill(self) -> None:
        self.clear()
        for at in range(0, COUNT, 1000):
            pipeline = self.client.pipeline(transaction=False)
            for transaction, body in zip(ORDERS[at : at + 1000], BODIES[at : at + 1000], strict=True):
                pipeline.xadd(self.stream, {"id": transaction.id, "body": body})
            pipeline.execute()

    def plain(self) -> None:
        client = redis.Redis.from_url(self.url)
        client.xgroup_create(self.stream, "g", "0")
        done = 0
        while reply := client.xreadgroup("g", "c", {self.stream: ">"}, count=BATCH):
            ids = [entry for entry, _ in _entries(reply)]
            client.xack(self.stream, "g", *ids)
            done += len(ids)
        assert done == COUNT
        client.close()

    def plain_async(self) -> None:
        async def main() -> None:
            client = redis.asyncio.Redis.from_url(self.url)
            await client.xgroup_create(self.stream, "g", "0")
            done = 0
            while reply := await client.xreadgroup("g", "c", {self.stream: ">"}, count=BATCH):
                ids = [entry for entry, _ in _entries(reply)]
                await client.xack(self.stream, "g", *ids)
                done += len(ids)
            assert done == COUNT
            await client.aclose()

        asyncio.run(main())

    def engine(self) -> None:
        with RedisStreamsConnector(self.url, self.stream) as connector:
            assert NoOp({"source": connector}).consume_transactions(self.policy).succeeded == COUNT

    def engine_async(self) -> None:
        async def main() -> None:
            async with AsyncRedisStreamsConnector(self.url, self.stream) as connector:
                report = await AsyncNoOp({"source": connector}).consume_transactions(self.policy)
                assert report.succeeded == COUNT

        asyncio.run(main())

    def worker(self, kind: str) -> None:
        """What a worker process of `onceward run --drain` does, with its counts and the app's own policy."""
        app = Onceward("bench")
        source = f"{self.url}/{self.stream}"
        if kind == "threads":

            @app.consumer(source, contract=None, name="no_op")
            def no_op(transaction: Transaction) -> None:
                return None

        else:

            @app.consumer(source, contract=None, name="no_op")
            async def no_op_async(transaction: Transaction) -> None:
                return None

        row = memoryview(array("q", bytes(8 * FIELDS)))
        keeper = keeper_of(app, app.consumers["no_op"], True, lambda: None, row)
        if isinstance(keeper, AsyncKeeper):
            asyncio.run(keeper.keep())
        else:
            keeper.keep()
        assert row[ORDER.index(Verdict.DONE)] == COUNT

    def idle(self) -> Iterator[Line]:
        policy = ConsumerPolicy.model_validate(
            {"loop": {"batch": {"size": BATCH}, "concurrency": {"value": 32}, "streaming": True}}
        )

        def wait(stops: Stops) -> None:
            with RedisStreamsConnector(self.url, "idle") as connector:
                task = NoOp({"source": connector})
                stops.append(task.stop)
                task.consume_transactions(policy)

        async def wait_async(stops: Stops) -> None:
            async with AsyncRedisStreamsConnector(self.url, "idle") as connector:
                task = AsyncNoOp({"source": connector})
                stops.append(task.stop)
                await task.consume_transactions(policy)

        yield from idle("Redis, threads, idle", self.client, wait)
        yield from idle("Redis, asyncio, idle", self.client, lambda stops: asyncio.run(wait_async(stops)))

    def plain_produce(self) -> None:
        for at in range(0, COUNT, IN_FLIGHT):
            pipeline = self.client.pipeline(transaction=False)
            for transaction in ORDERS[at : at + IN_FLIGHT]:
                pipeline.xadd(self.stream, {"id": transaction.id, "body": encode(transaction)})
            pipeline.execute()

    def engine_produce(self) -> None:
        policy = ProducerPolicy.model_validate(
            {"loop": {"batch": {"size": 1000}, "concurrency": {"value": IN_FLIGHT}}}
        )

        async def main() -> None:
            async with AsyncRedisStreamsConnector(self.url, self.stream) as connector:
                report = await Send({"out": connector}).produce_transactions(ORDERS, policy)
                assert report.succeeded == COUNT

        asyncio.run(main())


def _entries(reply: Any) -> Any:
    # The shape of the reply depends on the protocol version.
    return next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
