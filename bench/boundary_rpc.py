"""The boundary over RPC on loopback, with one server process: against empty calls to it, and against Redis that calls
fsync before each answer (appendfsync always)."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from bench.boundary import at_least, messages
from bench.boundary_process import serve_boundary
from bench.measure import Line
from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.client.plain_http import AsyncPlainCalls
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.v1.boundary_connect import BoundaryServiceClient
from onceward.boundary.wire import record
from onceward.testing.servers import redis_server

COUNT = 4000
CLIENTS = 32
ALONE = 400
FETCHES = 200
PAGE = 1000
CONFIRMED = 100
"""Facts of a page that is confirmed."""
CONFIRM_MS, FETCH_MS = 5.0, 50.0

EMPTY = "bench.boundary_empty:application"
BODY = record(*messages(1)[0])

_fresh = itertools.count()


def lines() -> Iterator[Line]:
    with (
        tempfile.TemporaryDirectory() as directory,
        serve_boundary(Path(directory), EMPTY) as url,
        redis_server(durable=True) as server,
    ):
        yield from asyncio.run(_measure(url, server.url))
        yield _threads(url, server.url)


async def _measure(url: str, redis_url: str) -> list[Line]:
    bare_client = BoundaryServiceClient(url, send_compression=None, accept_compression=())
    wire = redis.asyncio.Redis.from_url(redis_url)
    async with AsyncBoundaryClient(url) as client, bare_client as rpc, wire:
        empty, plain = pb.PutObjectRequest(), AsyncPlainCalls(url)  # the client's own way to call
        ready = pb.FetchFactsRequest(consumer_name="ready-made", limit=PAGE)
        ours = pb.FetchFactsRequest(consumer_name="reader", limit=PAGE)

        def append(count: int) -> Callable[[], Awaitable[Any] | None]:
            todo = iter(fresh(count))
            return lambda: client.append(*message) if (message := next(todo, None)) else None

        def repeated(count: int, call: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any] | None]:
            todo = iter(range(count))
            return lambda: call() if next(todo, None) is not None else None

        def add() -> Awaitable[Any]:
            return wire.xadd("facts", {"fact": BODY})

        alone_bare, alone = await in_turn(
            ALONE,
            lambda: clients(repeated(ALONE, lambda: plain.call("put_object", empty, None)), 1),
            lambda: clients(append(ALONE), 1),
        )
        bare, added, many = await in_turn(
            COUNT,
            lambda: clients(repeated(COUNT, lambda: plain.call("put_object", empty, None))),
            lambda: clients(repeated(COUNT, add)),
            lambda: clients(append(COUNT)),
        )
        page_bare, page = await in_turn(
            FETCHES,
            lambda: clients(repeated(FETCHES, lambda: rpc.fetch_facts(ready))),
            lambda: clients(repeated(FETCHES, lambda: rpc.fetch_facts(ours))),
        )
        await wire.xgroup_create("facts", "readers", id="0")

        async def read_and_acknowledge() -> None:
            found: Any = await wire.xreadgroup("readers", "one", {"facts": ">"}, count=CONFIRMED)
            [[_, entries]] = found
            await wire.xack("facts", "readers", *[each[0] for each in entries])

        handled = 0

        async def fetch_and_confirm() -> None:  # as the consumer's loop does, in one call
            nonlocal handled
            handled = (await client.fetch("confirming", CONFIRMED, confirm=handled)).facts[-1].offset

        turns = COUNT // CONFIRMED
        read, fetched = await in_turn(
            COUNT,
            lambda: clients(repeated(turns, read_and_acknowledge), 1),
            lambda: clients(repeated(turns, fetch_and_confirm), 1),
        )
        plain.close()
        confirm, fetch = await _latencies(client, rate=1e6 / many / 10)
    return [
        at_least("append, one after another; bare: an empty call", alone_bare, alone, 0.6),
        at_least("append, 32 at once; bare: an empty call", bare, many, 0.7),
        at_least("append, 32 at once; bare: XADD, fsync always", added, many, 0.8),
        at_least("fetch 1000 over RPC; bare: a ready-made page", page_bare, page, 0.5),
        at_least("confirm + fetch 100 in one call; bare: XREADGROUP + XACK", read, fetched, 1.0),
        _latency("confirm over RPC at a tenth of peak load, p99", confirm, CONFIRM_MS),
        _latency("fetch 100 over RPC at a tenth of peak load, p99", fetch, FETCH_MS),
    ]


def fresh(count: int) -> list[Any]:
    return messages(count, COUNT * next(_fresh))


def _threads(url: str, redis_url: str) -> Line:
    best = [float("inf"), float("inf")]
    with (
        BoundaryClient(url) as client,
        redis.Redis.from_url(redis_url) as wire,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        for _ in range(5):
            runs: Sequence[tuple[Callable[[Any], object], Any]] = (
                (lambda _: wire.xadd("facts", {"fact": BODY}), range(COUNT)),
                (lambda message: client.append(*message), fresh(COUNT)),
            )
            for index, (call, given) in enumerate(runs):
                began = time.perf_counter()
                list(pool.map(call, given))
                best[index] = min(best[index], time.perf_counter() - began)
    added, appended = (each / COUNT * 1e6 for each in best)
    return at_least("append, 32 threads; bare: XADD, fsync always", added, appended, 0.8)


async def clients(call: Callable[[], Awaitable[Any] | None], count: int = CLIENTS) -> None:
    async def client() -> None:
        while (made := call()) is not None:
            await made

    await asyncio.gather(*(client() for _ in range(count)))


async def in_turn(count: int, *runs: Callable[[], Awaitable[None]]) -> list[float]:
    """Microseconds of each, best of five."""
    best = [float("inf")] * len(runs)
    for _ in range(5):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            await run()
            best[index] = min(best[index], time.perf_counter() - began)
    return [each / count * 1e6 for each in best]


async def _latencies(client: AsyncBoundaryClient, rate: float) -> tuple[float, float]:
    """The 99th percentiles of confirms and fetches, in milliseconds, while facts are appended at this rate."""
    ended = False
    todo = iter(messages(1_000_000, 10_000_000))

    async def load() -> None:
        due = time.perf_counter()
        appends: set[asyncio.Task[Any]] = set()
        while not ended:
            appends.add(asyncio.create_task(client.append(*next(todo))))
            appends = {each for each in appends if not each.done()}
            due += 1 / rate
            await asyncio.sleep(max(due - time.perf_counter(), 0))
        await asyncio.gather(*appends)

    loading = asyncio.create_task(load())
    confirms, fetches = [], []
    for offset in range(1, 301):
        began = time.perf_counter()
        await client.fetch("timed", 100)
        fetched = time.perf_counter()
        await client.confirm("timed", offset)
        confirms.append(time.perf_counter() - fetched)
        fetches.append(fetched - began)
    ended = True
    await loading
    return tuple(statistics.quantiles(each, n=100)[98] * 1000 for each in (confirms, fetches))  # type: ignore[return-value]


def _latency(what: str, milliseconds: float, at_most: float) -> Line:
    return Line(
        what, at_most, milliseconds, f"≤ {at_most:g} ms", milliseconds <= at_most, f"{milliseconds:.1f} ms", unit="ms"
    )  # fmt: skip
