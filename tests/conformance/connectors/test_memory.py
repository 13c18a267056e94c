"""Specific to the queue in memory: its heaps must not grow with finished messages."""

from __future__ import annotations

import asyncio

from onceward.connectors import AsyncMemoryConnector, MemoryConnector
from onceward.transaction import Settlement, Transaction, Verdict


def test_memory_does_not_grow_with_what_is_done() -> None:
    queue = MemoryConnector(lease=3600.0)
    for _ in range(50):
        queue.dispatch_transactions([Transaction() for _ in range(100)])
        fetched = queue.fetch_transactions(100)
        queue.extend_transactions(fetched)
        queue.settle_transactions([Settlement(transaction, Verdict.DONE) for transaction in fetched])
    store = queue._store
    assert len(store._waiting) < 2000  # type: ignore[attr-defined]
    assert queue.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


def test_polling_an_empty_async_queue_lets_others_run() -> None:
    async def main() -> None:
        queue = AsyncMemoryConnector()
        others_ran = asyncio.Event()
        asyncio.get_running_loop().call_soon(others_ran.set)
        while not others_ran.is_set():
            await queue.fetch_transactions_async(1)

    asyncio.run(main())
