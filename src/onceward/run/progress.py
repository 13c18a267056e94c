"""A source with a count of what went in and out: progress is what a source is told, not that a process runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from onceward.transaction import Settlement, Transaction, Verdict


class Counts:
    """Of one consumer, over all its calls. Written by the engine's threads, read by the one that reports."""

    def __init__(self, on_answer: Callable[[], None]) -> None:
        self.told = dict.fromkeys(Verdict, 0)
        self.progress_at = time.monotonic()
        self.asking_since: float | None = None
        self._in_hand: dict[int, float] = {}
        """When each delivery was fetched that the source has not been told the end of."""
        self._lock = threading.Lock()
        self._on_answer = on_answer

    def asking(self) -> None:
        self.asking_since = time.monotonic()

    def fetched(self, batch: Sequence[Transaction]) -> None:
        now = time.monotonic()
        self.asking_since = None
        if batch:
            with self._lock:
                self._in_hand.update((id(transaction), now) for transaction in batch)
            self.progress_at = now
        self._on_answer()

    def settled(self, settlements: Sequence[Settlement]) -> None:
        with self._lock:
            for settlement in settlements:
                self._in_hand.pop(id(settlement.transaction), None)
                self.told[settlement.verdict] += 1
        self.progress_at = time.monotonic()

    def call_ended(self) -> int:
        """How many the source was not told of. They are nobody's now, and come again when their leases run out."""
        self.asking_since = None
        with self._lock:
            left = len(self._in_hand)
            self._in_hand.clear()
        return left

    def in_hand(self) -> tuple[int, float | None]:
        """How many, and when the oldest was fetched."""
        with self._lock:
            return len(self._in_hand), next(iter(self._in_hand.values()), None)


class _Counted:
    def __init__(self, source: Any, counts: Counts) -> None:
        self._source = source
        self._counts = counts
        self.lease: float = getattr(source, "lease", inf)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)


class Counted(_Counted):
    """A connector around a connector, in threads."""

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        self._counts.asking()
        batch: Sequence[Transaction] = self._source.fetch_transactions(batch_size, **extra)
        self._counts.fetched(batch)
        return batch

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        self._source.settle_transactions(settlements)
        self._counts.settled(settlements)


class AsyncCounted(_Counted):
    """The same in asyncio."""

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        self._counts.asking()
        batch: Sequence[Transaction] = await self._source.fetch_transactions_async(batch_size, **extra)
        self._counts.fetched(batch)
        return batch

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        await self._source.settle_transactions_async(settlements)
        self._counts.settled(settlements)
