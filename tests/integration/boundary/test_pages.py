"""The pages for operators while the store does not answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from onceward._time import WatchedClock
from onceward.boundary.boundary import Boundary
from onceward.boundary.server import pages
from onceward.boundary.server.pages import BoundaryPages
from onceward.boundary.store import BoundaryStore
from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.testing import servers
from onceward.testing.boundary import fact
from tests.support.boundary.databases import StorePlace, place
from tests.support.inbox.site import is_frozen
from tests.support.wait import until, until_async

__all__ = ["place"]

WAIT = pages.ANSWER_WAIT


@asynccontextmanager
async def opened(store: BoundaryStore) -> AsyncIterator[BoundaryPages]:
    try:
        await store.append(fact("m1"))
        await store.position("billing", create=True)
        yield BoundaryPages(Boundary(store))
    finally:
        await store.close()


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ANSWER_WAIT", 30.0)


@contextmanager
def little_time() -> Iterator[None]:
    """While the store is known to hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "ANSWER_WAIT", 0.1)
        yield


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for pid in pids:
            until(lambda pid=pid: is_frozen(pid))  # type: ignore[misc]
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def check_up(found: BoundaryPages) -> None:
    assert await found.answer("/readyz") == (200, pages.TEXT, b"ready\n")
    assert json.loads((await found.answer("/stats"))[2])["last"] == 1
    text = (await found.answer("/metrics"))[2].decode()
    assert "\nbsfg_store_up 1.0" in text
    assert "\nbsfg_frontier_offset 1.0" in text
    assert '\nbsfg_consumer_backlog{consumer="billing"} 1.0' in text


async def check_down(found: BoundaryPages, why: str) -> None:
    status, _, body = await found.answer("/readyz")
    assert (status, body[:11]) == (503, b"not ready: ")
    assert why in body.decode()
    status, kind, body = await found.answer("/stats")
    assert (status, kind) == (503, pages.JSON)
    answer = json.loads(body)
    assert answer["code"] == "unavailable"
    assert answer["message"].startswith("the store cannot be read: ")
    assert why in answer["message"]
    status, _, text = await found.answer("/metrics")
    assert status == 200, "the counters are needed most while the store is away"
    lines = text.decode().splitlines()
    assert "bsfg_store_up 0.0" in lines
    assert "bsfg_frontier_offset NaN" in lines, "unknown is unknown"
    assert not [line for line in lines if line.startswith("bsfg_consumer_backlog{")]
    assert (await found.answer("/livez"))[0] == 200


async def is_ready(found: BoundaryPages) -> bool:
    return (await found.answer("/readyz"))[0] == 200


@pytest.mark.req("BC-41")
def test_while_nats_is_frozen_or_down_the_pages_say_so() -> None:
    async def main() -> None:
        with servers.nats_server() as nats:
            async with opened(await JetStreamBoundaryStore.open(nats.url)) as found:
                assert nats._process is not None
                await check_up(found)
                with frozen([nats._process.pid]), little_time():
                    await check_down(found, "the store has not answered within 0.1 s")
                    assert len(asyncio.all_tasks()) < 20, "a page that is read often asks once"
                await until_async(lambda: is_ready(found))
                nats.kill()
                await until_async(lambda: _is_refused(found))
                await check_down(found, "cannot be reached")
                nats.start()
                await until_async(lambda: is_ready(found))
                await check_up(found)

    asyncio.run(main())


async def _is_refused(found: BoundaryPages) -> bool:
    return b"cannot be reached" in (await found.answer("/readyz"))[2]


@pytest.mark.req("BC-41")
def test_while_postgresql_is_frozen_the_pages_say_so(place: StorePlace) -> None:
    async def main() -> None:
        async with opened(await PostgreSqlBoundaryStore.open(place.url)) as found:
            await check_up(found)
            query = f"SELECT pid FROM pg_stat_activity WHERE application_name = '{place.name}'"
            # New connections would be answered, but a store uses those it has; and one hangs like a frozen server.
            place.admin.execute("BEGIN")
            place.admin.execute("LOCK TABLE onceward_boundary_log, onceward_boundary_cursors")
            with frozen([pid for (pid,) in place.ask(query)]), little_time():
                await asyncio.gather(*(check_down(found, "has not answered") for _ in range(5)))
                place.admin.execute("COMMIT")
            await until_async(lambda: is_ready(found))
            await check_up(found)

    asyncio.run(main())


@pytest.mark.req("BC-41")
def test_while_postgresql_is_away_the_pages_say_so(place: StorePlace) -> None:
    async def main() -> None:
        async with opened(await PostgreSqlBoundaryStore.open(place.url)) as found:
            await check_up(found)
            place.admin.execute("ALTER TABLE onceward_boundary_log RENAME TO away")
            await check_down(found, "PostgreSQL failed, or did not answer")
            place.admin.execute("ALTER TABLE away RENAME TO onceward_boundary_log")
            await check_up(found)

    asyncio.run(main())


@pytest.mark.req("BC-41")
def test_a_page_waits_for_a_second() -> None:
    assert WAIT == 1.0


@pytest.mark.req("BC-51")
def test_the_lag_of_a_consumer_does_not_follow_a_clock_that_jumps(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(SqliteBoundaryStore(tmp_path)) as asked:
            jump = [0.0]
            clock = WatchedClock(lambda: time.time() + jump[0], time.monotonic, "", tolerance=60.0)
            asked._boundary.clock = clock
            for jump[0] in (9 * 86400.0, -9 * 86400.0):
                _, _, stats = await asked.answer("/stats")
                [consumer] = json.loads(stats)["consumers"]
                assert 0 < consumer["lag_seconds"] < 60

    asyncio.run(story())
