"""Servers of a boundary on JetStream die, and NATS too: every answered fact is there once, without gaps in offsets."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TypeVar

import nats as nats_py
import pytest

from onceward.boundary.model import Appended, ObjectRef
from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
from onceward.boundary.wire import stored
from onceward.testing import servers
from onceward.testing.boundary import fact
from tests.crash.boundary.jetstream_worker import APPENDERS
from tests.support.boundary.availability import until_available
from tests.support.wait import until_async

SCRIPT = Path(__file__).with_name("jetstream_worker.py")
PATIENCE = 60.0

T = TypeVar("T")


async def check(store: JetStreamBoundaryStore, answered: Iterable[tuple[int, int]]) -> None:
    """The log has each answered fact at its offset, each id once, and no gap."""
    log: dict[int, str] = {}
    while page := await store.read(len(log), 1000):
        for record in page:
            log[record[0]] = stored(record).message_id
    assert list(log) == list(range(1, len(log) + 1))
    assert len(set(log.values())) == len(log)
    assert {offset: f"m{number}" for number, offset in answered}.items() <= log.items()


class Load:
    """Appenders of single facts and of batches, which retry until they get an answer, and a reader."""

    def __init__(self, stores: list[JetStreamBoundaryStore]) -> None:
        self.stores = stores
        self.answered: list[tuple[int, int]] = []
        self.seen = 0
        self._numbers = itertools.count()
        self._enough = asyncio.Event()

    async def __aenter__(self) -> Load:
        self._appending = [
            asyncio.create_task(self._append(store)) for store in self.stores for _ in range(APPENDERS)
        ]
        self._appending += [asyncio.create_task(self._append_many(store)) for store in self.stores]
        self._reading = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._enough.set()
        await asyncio.gather(*self._appending, self._reading)

    async def grow(self, count: int = 300) -> None:
        """Until so many more are answered."""
        wanted = len(self.answered) + count
        await until_async(lambda: len(self.answered) >= wanted, what="appends resume")

    async def _append(self, store: JetStreamBoundaryStore) -> None:
        for number in self._numbers:
            appended = await until_available(lambda number=number: store.append(fact(f"m{number}")))  # type: ignore[misc]
            self.answered.append((number, appended.offset))
            if self._enough.is_set():
                return

    async def _append_many(self, store: JetStreamBoundaryStore) -> None:
        while not self._enough.is_set():
            numbers = [next(self._numbers) for _ in range(30)]
            facts = [fact(f"m{number}") for number in numbers]
            appended = await until_available(lambda facts=facts: store.append_all(facts))  # type: ignore[misc]
            offsets = [each.offset for each in appended if isinstance(each, Appended)]
            assert offsets == sorted(offsets), "a later one was written before an earlier one"
            self.answered += zip(numbers, offsets, strict=True)

    async def _follow(self) -> None:
        while not self._enough.is_set():
            for record in await until_available(lambda: self.stores[-1].read(self.seen, 100)):
                assert record[0] == self.seen + 1, "a fact was passed over"
                self.seen = record[0]


@pytest.mark.req("BC-16", "BC-26")
def test_a_server_killed_under_load_loses_nothing_that_it_has_answered() -> None:
    dice = random.Random(3)
    answered: list[tuple[int, int]] = []
    with servers.nats_server() as nats:
        for _ in range(4):
            first = max((number for number, _ in answered), default=0)
            command = [sys.executable, str(SCRIPT), nats.url, "crash", str(max(0, first - 100))]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                lines = [process.stdout.readline() for _ in range(dice.randint(150, 600))]
                process.kill()
                lines += process.stdout.readlines()
            answered += [(int(number), int(offset)) for number, offset in map(str.split, _whole(lines))]

        async def main() -> None:
            store = await JetStreamBoundaryStore.open(nats.url, name="crash")
            await check(store, answered)
            await store.close()

        asyncio.run(main())


@pytest.mark.req("BC-02", "BC-16", "BC-17", "BC-26")
def test_nats_killed_and_restarted_under_load_loses_nothing_and_all_goes_on() -> None:
    async def main() -> None:
        with servers.nats_server() as nats:
            stores = [await JetStreamBoundaryStore.open(nats.url, name="crash") for _ in range(2)]
            kept: list[tuple[ObjectRef, bytes]] = []
            confirmed = 0
            async with Load(stores) as load:
                for round_ in range(4):
                    await load.grow()
                    putting = asyncio.create_task(_put(stores[0], round_))
                    await asyncio.sleep(0.005 * round_)
                    await asyncio.to_thread(nats.kill)
                    await asyncio.to_thread(nats.start)
                    kept.append(await putting)
                    offset = load.answered[-1][1]
                    assert (
                        await until_available(lambda offset=offset: stores[1].advance("c", offset))
                        >= confirmed
                    )  # type: ignore[misc]
                    confirmed = max(confirmed, offset)
                await load.grow()
            await check(stores[0], load.answered)
            assert await stores[0].position("c", create=False) == confirmed
            for ref, blob in kept:
                found, chunks = await stores[1].objects.get(ref.bucket, ref.key)
                assert found == ref
                assert b"".join([chunk async for chunk in chunks]) == blob
            for store in stores:
                await store.close()

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.req("BC-16", "BC-26")
def test_one_node_of_a_cluster_killed_under_load_loses_nothing_and_appends_resume() -> None:
    """First the leader of the stream, then, after it is back, a follower."""

    async def main() -> None:
        with servers.nats_cluster() as nodes:
            url = ",".join(node.url for node in nodes.values())
            stores = [await JetStreamBoundaryStore.open(url, name="crash", replicas=3) for _ in range(2)]
            async with Load(stores) as load:
                await load.grow()
                assert await until_available(lambda: stores[0].advance("c", 100)) == 100
                leader = await _leader(url)
                await asyncio.to_thread(nodes[leader].kill)
                await load.grow()
                await asyncio.to_thread(nodes[leader].start)
                await load.grow()
                assert await until_available(lambda: stores[1].position("c", create=False)) == 100
                leading = await _leader(url)
                follower = next(name for name in nodes if name not in (leader, leading))
                await asyncio.to_thread(nodes[follower].kill)
                await load.grow()
                await asyncio.to_thread(nodes[follower].start)
                await load.grow()
            await check(stores[0], load.answered)
            outcomes = await asyncio.gather(*(stores[at % 2].append(fact("once")) for at in range(50)))
            assert len({each.offset for each in outcomes}) == 1
            assert outcomes.count(Appended(outcomes[0].offset)) == 1
            for store in stores:
                await store.close()

    asyncio.run(main())


async def _leader(url: str) -> str:
    client = await nats_py.connect(url.split(","))
    info = await client.jetstream(timeout=PATIENCE).stream_info("crash-facts")
    await client.close()
    assert info.cluster is not None
    assert info.cluster.leader is not None
    return info.cluster.leader


async def _put(store: JetStreamBoundaryStore, number: int) -> tuple[ObjectRef, bytes]:
    blob = random.Random(number).randbytes(700_000)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(blob), 100_000):
            yield blob[at : at + 100_000]

    return await until_available(lambda: store.objects.put("b", str(number), pieces(), "")), blob


def _whole(lines: list[str]) -> list[str]:
    """Without a last line that the process did not finish."""
    return [line for line in lines if line.endswith("\n")]
