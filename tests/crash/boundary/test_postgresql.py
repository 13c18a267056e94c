"""Servers on one PostgreSQL are killed under load, and PostgreSQL itself: every answered fact is there, once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from onceward.boundary.errors import Unavailable
from onceward.boundary.store import BoundaryStore, Bounds
from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore
from onceward.boundary.wire import stored
from tests.crash.boundary.appender import fact
from tests.support.boundary.databases import StorePlace, place
from tests.support.own_postgres import OwnPostgres, own_postgres
from tests.support.wait import until_async

__all__ = ["place"]

SCRIPT = Path(__file__).with_name("appender.py")

T = TypeVar("T")


@contextmanager
def server(place: StorePlace, name: str, count: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT), place.url, name, str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def killed_after(process: subprocess.Popen[str], lines: int) -> list[list[str]]:
    """Its output until then, up to the last complete line."""
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    said += process.stdout.read().splitlines(keepends=True)
    assert process.wait(60) == -signal.SIGKILL
    return [line.split() for line in said if line.endswith("\n")]


async def whole_log(store: BoundaryStore) -> dict[str, int]:
    """Offsets by message id. Checks that there is no gap and no id twice."""
    found: dict[str, int] = {}
    after = 0
    while records := await store.read(after, 1000):
        assert [record[0] for record in records] == list(range(after + 1, after + 1 + len(records)))
        after = records[-1][0]
        found.update((stored(record).message_id, record[0]) for record in records)
    assert await store.bounds() == Bounds(1, after)
    assert len(found) == after
    return found


@pytest.mark.req("BC-02", "BC-16")
def test_two_servers_killed_again_and_again_lose_nothing_that_was_answered(place: StorePlace) -> None:
    offsets: dict[str, int] = {}
    confirmed: dict[str, int] = {}
    for round_ in range(3):
        names = (f"a{round_}", f"b{round_}")
        with server(place, names[0]) as one, server(place, names[1]) as two:
            for name, process in zip(names, (one, two), strict=True):
                for line in killed_after(process, 60 * (round_ + 1)):
                    if line[0] == "appended":
                        offsets[line[1]] = int(line[2])
                    else:
                        confirmed[name] = max(int(line[1]), confirmed.get(name, 0))

    async def check() -> None:
        store = await PostgreSqlBoundaryStore.open(place.url)
        found = await whole_log(store)
        assert offsets.items() <= found.items()
        positions = {cursor.name: cursor.offset for cursor in await store.cursors()}
        assert positions.keys() == confirmed.keys()
        # A confirm may have been written but not answered.
        assert all(confirmed[name] <= position <= len(found) for name, position in positions.items())
        again = await store.append(fact(min(offsets)))
        assert (again.offset, again.duplicate) == (offsets[min(offsets)], True)
        assert (await store.append(fact("new"))).offset == len(found) + 1
        await store.close()

    assert len(offsets) > 300
    asyncio.run(check())


@pytest.mark.req("BC-16")
def test_postgresql_restarted_under_load_is_taken_up_again_by_itself() -> None:
    """A caller that gets an error repeats with the same id, as the contract says. The store is not reopened."""
    with own_postgres() as postgres:
        asyncio.run(_restarted_under_load(postgres))


async def _restarted_under_load(postgres: OwnPostgres) -> None:
    store = await PostgreSqlBoundaryStore.open(postgres.plain_url)
    offsets: dict[str, int] = {}
    refused = 0
    over = False

    async def insist(call: Callable[[], Awaitable[T]]) -> T:
        nonlocal refused
        while True:
            try:
                return await call()
            except Unavailable:
                refused += 1
                await asyncio.sleep(0.02)

    async def append(writer: int) -> None:
        number = 0
        while not over:
            name = f"{writer}-{number}"
            done = await insist(lambda name=name: store.append(fact(name)))
            offsets[name] = done.offset
            await insist(lambda offset=done.offset: store.advance("c", offset))
            number += 1

    async def grown(by: int) -> None:
        wanted = len(offsets) + by
        await until_async(lambda: len(offsets) >= wanted)

    async with asyncio.timeout(90):
        writers = [asyncio.create_task(append(writer)) for writer in range(8)]
        await grown(200)
        await asyncio.to_thread(postgres.control, "restart", "-m", "fast")
        await grown(200)
        await asyncio.to_thread(postgres.kill_a_backend)
        await grown(200)
        await asyncio.to_thread(postgres.control, "stop", "-m", "immediate")
        before = refused
        await until_async(lambda: refused >= before + 8)
        await asyncio.to_thread(postgres.start)
        await grown(200)
        over = True
        await asyncio.gather(*writers)
    assert refused
    assert await whole_log(store) == offsets
    assert await store.position("c", create=False) == max(offsets.values())
    await store.close()
