"""The embedded boundary store, against plain SQLite with the same table; both durable (synchronous=FULL)."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from bench.measure import Line, compare, ratio
from onceward.boundary.boundary import Boundary
from onceward.boundary.canonical import content_digest
from onceward.boundary.model import Envelope, Fact, envelope_for, fact_of
from onceward.boundary.stores import directory, sqlite
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.boundary.wire import record

COUNT = 10_000
APPENDERS = 32
BATCH = 100
SHORT, LONG = 10_000, 1_000_000

Message = tuple[Envelope, Fact]
_numbers = itertools.count()


def messages(count: int, start: int = 0) -> list[Message]:
    """Facts of about 300 bytes."""
    return [
        (
            envelope_for(f"batch-{number:08}-step-completed", from_zone="plant-a", to_zone="hq"),
            fact_of(
                f"batch:B{number:08}",
                "step_completed",
                {"step": "mixing", "litres": 480, "operator": "o-117", "line": "filler-07", "note": "n" * 80},
            ),
        )
        for number in range(start, start + count)
    ]


def lines() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as directory:
        home, given = Path(directory), messages(COUNT)

        def ours() -> None:
            asyncio.run(appending(home / str(next(_numbers)), given, APPENDERS))

        def one_by_one() -> None:
            by_hand(home / f"{next(_numbers)}.db", given[: COUNT // 20], 1)

        def in_batches() -> None:
            by_hand(home / f"{next(_numbers)}.db", given, BATCH)

        single, _ = compare(COUNT // 20, one_by_one, lambda: None, rounds=3)
        batched, measured = compare(COUNT, in_batches, ours)
        yield at_least("append, 32 at once; bare: one commit per fact", single, measured, 10)
        yield at_least("append, 32 at once; bare: one commit per hundred", batched, measured, 0.5)
        yield from fetching(home)


def at_least(what: str, bare: float, ours: float, times: float) -> Line:
    """A comparison of rates: ours must be at least `times` the bare one."""
    return Line(what, bare, ours, f"≥ {times:g} ×", bare >= ours * times, f"{bare / ours:.2f} ×")


async def appending(place: Path, given: list[Message], appenders: int) -> None:
    store = SqliteBoundaryStore(place)
    boundary = Boundary(store)
    todo = iter(given)

    async def appender() -> None:
        for envelope, fact in todo:
            await boundary.append(envelope, fact)

    await asyncio.gather(*(appender() for _ in range(appenders)))
    await store.close()


def by_hand(path: Path, given: list[Message], batch: int) -> None:
    """The store's table and the same digests, one transaction per batch, and nothing else."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        for statement in directory.SCHEMA:
            connection.execute(statement)
        now = time.time_ns() // 1_000_000
        for at in range(0, len(given), batch):
            rows = [
                (offset, each[0].message_id, content_digest(*each), record(*each), "operational", now)
                for offset, each in enumerate(given[at : at + batch], at + 1)
            ]
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(sqlite.INSERT, rows)
            connection.execute("COMMIT")


def fetching(home: Path) -> Iterator[Line]:
    """A page of a long log against one of a short log, at their start, middle and end."""
    short, long = (_fill(home / f"log-{length}", length) for length in (SHORT, LONG))
    rounds = [(asyncio.run(_page(short, SHORT)), asyncio.run(_page(long, LONG))) for _ in range(7)]
    bare, ours = (min(times) for times in zip(*rounds, strict=True))
    yield ratio("fetch 100 of 1,000,000 facts; bare: of 10,000", (bare, ours), at_most=1.1)


async def _page(place: Path, length: int) -> float:
    store = SqliteBoundaryStore(place)
    boundary = Boundary(store)
    times = []
    for at in (0, length // 2, length - 200):
        name = f"c{next(_numbers)}"
        await store.advance(name, at)
        for _ in range(200):
            began = time.perf_counter()
            records, _gap = await boundary.fetch(name, 100)
            times.append(time.perf_counter() - began)
            assert len(records) == 100
    await store.close()
    return statistics.median(times) * 1e6


def _fill(place: Path, length: int) -> Path:
    asyncio.run(SqliteBoundaryStore(place).close())
    with closing(sqlite3.connect(place / "boundary.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        ((envelope, fact),) = messages(1)
        body, digest = record(envelope, fact), content_digest(envelope, fact)
        connection.execute("BEGIN")
        connection.executemany(
            sqlite.INSERT, ((n, f"message-{n}", digest, body, "operational", n) for n in range(1, length + 1))
        )
        connection.execute("COMMIT")
    return place
