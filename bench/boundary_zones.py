"""Forwarding a long backlog between two zones on loopback, against 32 concurrent appends to the receiver.

The source is another process; the receiver is in this one.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.boundary import APPENDERS, Message, appending, at_least, messages
from bench.boundary_process import serve_boundary
from bench.measure import Line, compare
from onceward.boundary import AsyncBoundaryClient
from onceward.boundary.boundary import Boundary
from onceward.boundary.links.link import ZoneLink
from onceward.boundary.stores.sqlite import SqliteBoundaryStore

BACKLOG = 100_000

_numbers = itertools.count()


def lines() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as directory:
        home, given = Path(directory), messages(BACKLOG)
        asyncio.run(_fill(home / "source", given))
        with serve_boundary(home / "source") as url:

            def append() -> None:
                asyncio.run(appending(home / str(next(_numbers)), given, APPENDERS))

            def forward() -> None:
                asyncio.run(_forward(url, home / str(next(_numbers))))

            bare, ours = compare(BACKLOG, append, forward, rounds=3)
        yield at_least("forward 100,000 facts; bare: append, 32 at once", bare, ours, 0.5)


async def _fill(place: Path, given: list[Message]) -> None:
    store = SqliteBoundaryStore(place)
    for at in range(0, len(given), 1000):
        await Boundary(store).append_all(given[at : at + 1000])
    await store.close()


async def _forward(url: str, place: Path) -> None:
    store = SqliteBoundaryStore(place)
    link = ZoneLink("source", lambda: AsyncBoundaryClient(url), Boundary(store), "hq", consumer=place.name)
    await link.drain()
    assert (await store.bounds()).last == BACKLOG
    await store.close()
