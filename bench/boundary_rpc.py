"""The boundary over RPC on loopback, with one server process and 32 concurrent clients, against empty calls to it."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from bench.boundary import at_least, messages
from bench.boundary_process import serve_boundary
from bench.measure import Line
from onceward.boundary import AsyncBoundaryClient
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.v1.boundary_connect import BoundaryServiceClient

COUNT = 4000
CLIENTS = 32
FETCHES = 200
PAGE = 1000
CONFIRM_MS, FETCH_MS = 10.0, 50.0
"""The upper limits that the consumer guide calls normal."""

EMPTY = "bench.boundary_empty:application"

_fresh = itertools.count()


def lines() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as directory, serve_boundary(Path(directory), EMPTY) as url:
        yield from asyncio.run(_measure(url))


async def _measure(url: str) -> list[Line]:
    bare_client = BoundaryServiceClient(url, send_compression=None, accept_compression=())
    async with AsyncBoundaryClient(url) as client, bare_client as rpc:
        empty = pb.PutObjectRequest()
        ready = pb.FetchFactsRequest(consumer_name="ready-made", limit=PAGE)

        async def append_some() -> None:
            todo = iter(messages(COUNT, COUNT * next(_fresh)))
            await clients(lambda: _next(todo, client))

        async def call_empty() -> None:
            todo = iter(range(COUNT))
            await clients(lambda: rpc.put_object(empty) if next(todo, None) is not None else None)

        async def fetch_pages() -> None:
            todo = iter(range(FETCHES))
            ours = pb.FetchFactsRequest(consumer_name="reader", limit=PAGE)
            await clients(lambda: rpc.fetch_facts(ours) if next(todo, None) is not None else None)

        async def fetch_ready() -> None:
            todo = iter(range(FETCHES))
            await clients(lambda: rpc.fetch_facts(ready) if next(todo, None) is not None else None)

        bare, ours = await in_turn(COUNT, call_empty, append_some)
        page_bare, page_ours = await in_turn(FETCHES, fetch_ready, fetch_pages)
        confirm, fetch = await _latencies(client, rate=1e6 / ours / 10)
    return [
        at_least("append over RPC, 32 clients; bare: an empty call", bare, ours, 0.7),
        at_least("fetch 1000 over RPC; bare: a ready-made page", page_bare, page_ours, 0.5),
        _latency("confirm over RPC at a tenth of peak load, p99", confirm, CONFIRM_MS),
        _latency("fetch 100 over RPC at a tenth of peak load, p99", fetch, FETCH_MS),
    ]


def _next(todo: Iterator[Any], client: AsyncBoundaryClient) -> Awaitable[Any] | None:
    message = next(todo, None)
    return None if message is None else client.append(*message)


async def clients(call: Callable[[], Awaitable[Any] | None]) -> None:
    async def client() -> None:
        while (made := call()) is not None:
            await made

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def in_turn(
    count: int, bare: Callable[[], Awaitable[None]], ours: Callable[[], Awaitable[None]]
) -> tuple[float, float]:
    best = [float("inf"), float("inf")]
    for _ in range(5):
        for index, run in enumerate((bare, ours)):
            began = time.perf_counter()
            await run()
            best[index] = min(best[index], time.perf_counter() - began)
    return best[0] / count * 1e6, best[1] / count * 1e6


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
