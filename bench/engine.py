"""The engine without telemetry, against a bare thread pool and bare tasks under a semaphore."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from bench import work
from bench.measure import Line, added, compare, ratio
from onceward import Transaction


def lines() -> Iterator[Line]:
    for concurrency in (1, 8, 32):
        for mode in ("batch", "continuous"):
            given = work.policy(concurrency, mode)
            what = f"concurrency {concurrency}, {mode}"
            yield ratio(
                f"threads, {what}",
                compare(work.COUNT, bare_pool(concurrency), work.threads(given)),
                at_most=1.0,
            )
            yield ratio(
                f"asyncio, {what}",
                compare(work.COUNT, bare_tasks(concurrency), work.tasks(given)),
                at_most=1.0,
            )
    without, limited = work.policy(), work.policy(timeout=30.0)
    yield added(
        "threads, a step timeout",
        compare(work.COUNT, work.threads(without), work.threads(limited)),
        at_most=15,
    )
    yield added(
        "asyncio, a step timeout", compare(work.COUNT, work.tasks(without), work.tasks(limited)), at_most=10
    )


def bare_pool(concurrency: int) -> Callable[[], object]:
    def run() -> None:
        with ThreadPoolExecutor(concurrency) as pool:
            for batch in work.batches():
                futures = [pool.submit(work.handle, transaction) for transaction in batch]
                for future in futures:
                    future.result()

    return run


def bare_tasks(concurrency: int) -> Callable[[], object]:
    async def consume() -> None:
        semaphore = asyncio.Semaphore(concurrency)

        async def one(transaction: Transaction) -> None:
            async with semaphore:
                await work.handle_async(transaction)

        for batch in work.batches():
            tasks = [asyncio.create_task(one(transaction)) for transaction in batch]
            for task in tasks:
                await task

    return lambda: asyncio.run(consume())
