"""The boundary store on NATS JetStream, against a plain nats-py client that makes the same durable calls."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Iterator

import nats
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.client import JetStreamContext

from bench.measure import Line, compare, ratio
from onceward.boundary.store import NewFact
from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
from onceward.testing.servers import nats_server

COUNT = 10_000
APPENDERS = 32
PAGE = 1000
PAGES = 20
RECORD = b"x" * 300
ROUNDS = 7
"""More than usual: each involves two processes, so a busy machine spoils more of them."""


def lines() -> Iterator[Line]:
    with nats_server() as server:
        bench = OnJetStream(server.url)
        yield ratio(
            "boundary on JetStream, append, 32 at once",
            compare(COUNT, bench.plain_publish, bench.append, rounds=ROUNDS),
            at_most=1 / 0.5,
        )
        bench.append()
        yield ratio(
            "boundary on JetStream, a fact of a page of 1000",
            compare(PAGE * PAGES, bench.plain_fetch, bench.read, rounds=ROUNDS),
            at_most=1 / 0.5,
        )


class OnJetStream:
    def __init__(self, url: str) -> None:
        self.url = url
        self.name = ""

    def plain_publish(self) -> None:
        """Publish each on its own subject, and await JetStream's answer."""

        async def publish(js: JetStreamContext) -> None:
            name = uuid.uuid4().hex
            await js.add_stream(name=name, subjects=[f"{name}.*"])
            await _at_once(lambda number: js.publish(f"{name}.{number}", RECORD))

        asyncio.run(self._plain(publish))

    def append(self) -> None:
        async def main() -> None:
            self.name = uuid.uuid4().hex
            store = await JetStreamBoundaryStore.open(self.url, name=self.name)
            await _at_once(lambda number: store.append(_fact(number)))
            await store.close()

        asyncio.run(main())

    def plain_fetch(self) -> None:
        """Read the same messages with a pull consumer, again from the start after the last page."""

        async def fetch(js: JetStreamContext) -> None:
            done = 0
            unacked = ConsumerConfig(ack_policy=AckPolicy.NONE)
            while done < PAGE * PAGES:
                subscription = await js.pull_subscribe("", stream=f"{self.name}-facts", config=unacked)
                for _ in range(COUNT // PAGE):
                    done += len(await subscription.fetch(PAGE, timeout=10))
                await subscription.unsubscribe()
            assert done == PAGE * PAGES

        asyncio.run(self._plain(fetch))

    def read(self) -> None:
        async def main() -> None:
            store = await JetStreamBoundaryStore.open(self.url, name=self.name)
            done = 0
            while done < PAGE * PAGES:
                for after in range(0, COUNT, PAGE):
                    done += len(await store.read(after, PAGE))
            assert done == PAGE * PAGES
            await store.close()

        asyncio.run(main())

    async def _plain(self, work: Callable[[JetStreamContext], Awaitable[None]]) -> None:
        client = await nats.connect(self.url)
        await work(client.jetstream())
        await client.close()


async def _at_once(call: Callable[[int], Awaitable[object]]) -> None:
    numbers = iter(range(COUNT))

    async def appender() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(appender() for _ in range(APPENDERS)))


def _fact(number: int) -> NewFact:
    return NewFact(str(number), hashlib.sha256(str(number).encode()).digest(), RECORD)
