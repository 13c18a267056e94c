"""`charge.send(order)` against the bare loop of each sink: XADD, an INSERT with its commit, an append.

The bare INSERTs are into a table of the same columns and indexes as that of a queue, with the same durability.
Bare and ours take turns in short blocks, and the figure is the median of their ratios: both see the same machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import redis
import redis.asyncio

from bench.boundary_process import serve_boundary
from bench.measure import Line
from onceward import Onceward, Transaction
from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.connectors.sqlite.statements import SCHEMA
from onceward.testing.servers import postgres_server, redis_server

ORDER = {"id": "order-1", "total": 3}
BLOCKS = 9
PIPELINE = 500
AT_ONCE = 16

Loop = Callable[[int], Any]
_fresh = itertools.count()


def lines() -> Iterator[Line]:
    with redis_server() as server:
        yield from _redis(server.url)
    with tempfile.TemporaryDirectory() as directory:
        yield from _sqlite(Path(directory))
    with postgres_server() as server:
        yield from _postgresql(server.url)
    with tempfile.TemporaryDirectory() as directory, serve_boundary(Path(directory)) as url:
        yield from _boundary(url)


def _redis(url: str) -> Iterator[Line]:
    client = redis.Redis.from_url(url)
    charge = _charging(f"{url}/orders")

    def add(count: int) -> None:
        for _ in range(count):
            client.xadd("plain", {"body": json.dumps(ORDER)})

    def add_many(count: int) -> None:
        for _ in range(count // PIPELINE):
            pipeline = client.pipeline(transaction=False)
            for _ in range(PIPELINE):
                pipeline.xadd("plain", {"body": json.dumps(ORDER)})
            pipeline.execute()

    yield _line("send one to Redis; bare: XADD", 500, add, _one(charge), 0.8)
    yield _line("send many to Redis; bare: pipelined XADD", 10_000, add_many, _many(charge), 0.7)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield _line(
            "send from 16 threads to Redis; bare: XADD",
            1600,
            _spread(pool, add),
            _spread(pool, _one(charge)),
            0.8,
        )
    yield from asyncio.run(_redis_async(url, charge))


async def _redis_async(url: str, charge: Any) -> list[Line]:
    async with redis.asyncio.Redis.from_url(url) as client:

        async def add(count: int) -> None:
            for _ in range(count):
                await client.xadd("plain", {"body": json.dumps(ORDER)})

        async def send(count: int) -> None:
            for _ in range(count):
                await charge.send_async(ORDER)

        async def add_at_once(count: int) -> None:
            await asyncio.gather(*(add(count // AT_ONCE) for _ in range(AT_ONCE)))

        async def send_at_once(count: int) -> None:
            await asyncio.gather(*(send(count // AT_ONCE) for _ in range(AT_ONCE)))

        return [
            await _line_async("send one to Redis in asyncio; bare: XADD", 500, add, send, 0.8),
            await _line_async(
                "send from 16 tasks to Redis; bare: XADD", 1600, add_at_once, send_at_once, 0.8
            ),
        ]


def _sqlite(directory: Path) -> Iterator[Line]:
    plain = sqlite3.connect(directory / "plain.db", isolation_level=None)
    plain.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL")
    for statement in SCHEMA[:2]:  # the table and the index of a queue
        plain.execute(statement)
    append = "INSERT INTO messages (enqueued_at, body) VALUES (?, ?)"
    charge = _charging(f"sqlite:///{directory}/orders.db")

    def insert(count: int) -> None:
        for _ in range(count):
            plain.execute(append, (time.time(), json.dumps(ORDER)))

    def insert_many(count: int) -> None:
        for _ in range(count // PIPELINE):
            plain.execute("BEGIN")
            plain.executemany(append, ((time.time(), json.dumps(ORDER)) for _ in range(PIPELINE)))
            plain.execute("COMMIT")

    yield _line("send one to SQLite; bare: INSERT", 200, insert, _one(charge), 0.8)
    yield _line("send many to SQLite; bare: 500 per commit", 5000, insert_many, _many(charge), 0.7)
    plain.close()


def _postgresql(url: str) -> Iterator[Line]:
    charge = _charging(f"{url}{'&' if '?' in url else '?'}queue=orders")
    with psycopg.connect(url, autocommit=True) as plain:
        charge.send(ORDER)  # which creates the table of the queue, to copy it
        plain.execute("CREATE SEQUENCE plain_seq")
        plain.execute("CREATE TABLE plain (LIKE onceward_queue_messages INCLUDING ALL)")
        append = """
            INSERT INTO plain (queue, seq, enqueued_at, body)
            SELECT 'orders', nextval('plain_seq'), %s, unnest(%s::bytea[])
        """
        append_one = """
            INSERT INTO plain (queue, seq, enqueued_at, body) VALUES ('orders', nextval('plain_seq'), %s, %s)
        """

        def insert(count: int) -> None:
            for _ in range(count):
                plain.execute(append_one, (time.time(), json.dumps(ORDER).encode()))

        def insert_many(count: int) -> None:
            for _ in range(count // PIPELINE):
                bodies = [json.dumps(ORDER).encode() for _ in range(PIPELINE)]
                plain.execute(append, (time.time(), bodies))

        yield _line("send one to PostgreSQL; bare: INSERT", 200, insert, _one(charge), 0.8)
        yield _line("send many to PostgreSQL; bare: 500 per INSERT", 5000, insert_many, _many(charge), 0.7)


def _boundary(url: str) -> Iterator[Line]:
    app = Onceward("bench")
    run = f"{time.time_ns()}"

    @app.producer(f"boundary+{url}?from_zone=plant&to_zone=hq")
    def place(count: int) -> Iterator[Transaction]:
        for _ in range(count):
            yield Transaction(
                id=f"{run}-{next(_fresh)}",
                payload={"subject": "order:1", "predicate": "placed", "object": ORDER},
            )

    with BoundaryClient(url) as client:

        def append(count: int) -> None:
            for _ in range(count):
                number = next(_fresh)
                fact = fact_of(f"order:{number}", "placed", ORDER)
                client.append(envelope_for(f"{run}-bare-{number}", from_zone="plant", to_zone="hq"), fact)

        def send(count: int) -> None:
            for _ in range(count):
                place.send(1)

        yield _line("send one to a boundary; bare: append", 100, append, send, 0.8)


def _charging(url: str) -> Any:
    app = Onceward("bench")

    @app.consumer(url)
    def charge(order: dict[str, Any]) -> None: ...

    return charge


def _one(charge: Any) -> Loop:
    def send(count: int) -> None:
        for _ in range(count):
            charge.send(ORDER)

    return send


def _many(charge: Any) -> Loop:
    return lambda count: charge.send_many(ORDER for _ in range(count))


def _spread(pool: ThreadPoolExecutor, loop: Loop) -> Loop:
    return lambda count: list(pool.map(loop, [count // AT_ONCE] * AT_ONCE))


def _line(what: str, count: int, bare: Loop, ours: Loop, at_least: float) -> Line:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(BLOCKS + 1):
        for each, loop in zip(times, (bare, ours), strict=True):
            began = time.perf_counter()
            loop(count)
            each.append((time.perf_counter() - began) / count * 1e6)
    return _result(what, *times, at_least)


async def _line_async(
    what: str,
    count: int,
    bare: Callable[[int], Awaitable[None]],
    ours: Callable[[int], Awaitable[None]],
    at_least: float,
) -> Line:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(BLOCKS + 1):
        for each, loop in zip(times, (bare, ours), strict=True):
            began = time.perf_counter()
            await loop(count)
            each.append((time.perf_counter() - began) / count * 1e6)
    return _result(what, *times, at_least)


def _result(what: str, bare: list[float], ours: list[float], at_least: float) -> Line:
    """Without the first block, which connects."""
    ratio = statistics.median(one / other for one, other in zip(bare[1:], ours[1:], strict=True))
    return Line(what, min(bare[1:]), min(ours[1:]), f"≥ {at_least:g} ×", ratio >= at_least, f"{ratio:.2f} ×")
