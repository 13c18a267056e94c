"""A source that counts every delivery and notes every verdict."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from onceward import Transaction
from onceward.transaction import Settlement, Verdict
from tests.soak.diary import Diary

MAX_DELIVERIES = 3


class Source:
    """Delivers each id until it is done, refused, or has failed `MAX_DELIVERIES` times."""

    lease = 5.0

    def __init__(self, diary: Diary, ids: Iterable[str]) -> None:
        self._diary = diary
        self._lock = threading.Lock()
        self._ready = deque(ids)
        self._delayed: list[tuple[float, str]] = []
        self._numbers: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self.in_flight: set[tuple[str, int]] = set()
        self.ended: dict[str, str] = {}

    def fetch_transactions(self, batch_size: int, /, **_: Any) -> Sequence[Transaction]:
        with self._lock:
            now = time.monotonic()
            self._ready.extend(each for due, each in self._delayed if due <= now)
            self._delayed = [(due, each) for due, each in self._delayed if due > now]
            return [self._deliver(self._ready.popleft()) for _ in range(min(batch_size, len(self._ready)))]

    def _deliver(self, id: str) -> Transaction:
        number = self._numbers[id] = self._numbers.get(id, 0) + 1
        self.in_flight.add((id, number))
        self._diary.deliver(id, number)
        return Transaction(id, None, {"delivery": number})

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        with self._lock:
            for settlement in settlements:
                self._settle(settlement)

    def _settle(self, settlement: Settlement) -> None:
        transaction = settlement.transaction
        delivery = self._diary.find(transaction)
        delivery.verdicts.append(settlement.verdict)
        self.in_flight.discard((delivery.id, delivery.number))
        if delivery.id in self.ended:
            return
        if settlement.verdict is Verdict.DONE:
            self.ended[delivery.id] = "done"
        elif settlement.verdict is Verdict.RETURNED:
            self._delayed.append((time.monotonic() + settlement.delay, delivery.id))
        else:
            failures = self._failures[delivery.id] = self._failures.get(delivery.id, 0) + 1
            refused = settlement.error is not None and settlement.error.category == "BUSINESS"
            if refused or failures >= MAX_DELIVERIES:
                self.ended[delivery.id] = "dead"
            else:
                self._ready.append(delivery.id)

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None: ...

    def expire(self) -> None:
        """End all leases, as if time had passed: what is in flight and not ended comes again."""
        with self._lock:
            for id, number in self.in_flight:
                if id not in self.ended and number == self._numbers[id]:
                    self._ready.append(id)
            self.in_flight.clear()

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._ready) + len(self._delayed)


class AsyncSource:
    """The same source for asyncio."""

    lease = Source.lease

    def __init__(self, source: Source) -> None:
        self._source = source

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        return self._source.fetch_transactions(batch_size, **extra)

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        self._source.settle_transactions(settlements)

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None: ...
