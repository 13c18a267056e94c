"""The engines on JetStream, against a plain nats-py loop: pull a batch, then `ack_sync` every message of it at once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import nats
from nats.errors import TimeoutError as NothingLeft

from bench.measure import Line, compare, ratio
from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.connectors.jetstream import AsyncJetStreamConnector, JetStreamConnector
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.testing.servers import nats_server

COUNT = 5_000
BATCH = 100
ROUNDS = 5
ORDERS = [Transaction(id=f"order-{number}", payload={"order": number}) for number in range(COUNT)]


class TakeOrder(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        return None


class AsyncTakeOrder(AsyncConsumerTask):
    async def process_transaction(self, transaction: Transaction) -> None:
        return None


def lines() -> Iterator[Line]:
    with nats_server() as server:
        bench = OnJetStream(server.url)
        yield ratio(
            "JetStream, asyncio, batch 100, concurrency 32",
            compare(COUNT, bench.plain, bench.engine_async, prepare=bench.fill, rounds=ROUNDS),
            at_most=1.2,
        )
        yield ratio(
            "JetStream, threads, batch 100, concurrency 32",
            compare(COUNT, bench.plain, bench.engine, prepare=bench.fill, rounds=ROUNDS),
            at_most=1.2,
        )


class OnJetStream:
    def __init__(self, url: str) -> None:
        self.url = url
        self.policy = ConsumerPolicy.model_validate(
            {"loop": {"batch": {"size": BATCH}, "concurrency": {"value": 32}, "mode": "continuous"}}
        )
        self.stream = ""

    def fill(self) -> None:
        self.stream = uuid.uuid4().hex
        with JetStreamConnector(self.url, self.stream) as connector:
            for at in range(0, COUNT, 1000):
                connector.dispatch_transactions(ORDERS[at : at + 1000])

    def plain(self) -> None:
        async def main() -> None:
            client = await nats.connect(self.url)
            pulls = await client.jetstream().pull_subscribe(self.stream, "plain", stream=self.stream)
            done = 0
            while done < COUNT:
                try:
                    messages = await pulls.fetch(BATCH, timeout=1)
                except NothingLeft:
                    break
                await asyncio.gather(*(each.ack_sync(timeout=5) for each in messages))
                done += len(messages)
            assert done == COUNT
            await client.close()

        asyncio.run(main())

    def engine(self) -> None:
        with JetStreamConnector(self.url, self.stream) as connector:
            assert TakeOrder({"source": connector}).consume_transactions(self.policy).succeeded == COUNT

    def engine_async(self) -> None:
        async def main() -> None:
            async with AsyncJetStreamConnector(self.url, self.stream) as connector:
                report = await AsyncTakeOrder({"source": connector}).consume_transactions(self.policy)
                assert report.succeeded == COUNT

        asyncio.run(main())
