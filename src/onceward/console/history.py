"""What each consumer did in every minute of the last hour, for sparklines. In memory: a restart begins it again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping
from typing import NamedTuple

MINUTES = 60
RATE_SECONDS = 60.0


class Counted(NamedTuple):
    succeeded: int = 0
    failed: int = 0

    def plus(self, other: Counted) -> Counted:
        return Counted(self.succeeded + other.succeeded, self.failed + other.failed)

    def since(self, before: Counted) -> Counted:
        """What was added. A count that is lower than before began from zero."""
        return Counted(*(now - was if now >= was else now for now, was in zip(self, before, strict=True)))


class ConsumerHistory:
    def __init__(self) -> None:
        self.minutes: deque[Counted] = deque(maxlen=MINUTES)
        self.total: Counted | None = None
        """What its workers have done; None if none was seen."""
        self._minute: int | None = None
        self._seen: deque[tuple[float, Counted]] = deque()
        self._workers: dict[Hashable, Counted] = {}

    def add(self, workers: Mapping[Hashable, Counted], now: float) -> None:
        """Note the counts of each worker so far. What the first ones did before was not seen in its minutes."""
        new = Counted()
        for worker, counted in workers.items():
            new = new.plus(counted.since(self._workers.get(worker, Counted())))
        self._workers |= workers
        self.total, new = (new, Counted()) if self.total is None else (self.total.plus(new), new)
        minute = int(now // 60)
        if self._minute is None:
            self.minutes.append(Counted())
        else:
            self.minutes.extend([Counted()] * min(minute - self._minute, MINUTES))
        self._minute = minute
        self.minutes[-1] = self.minutes[-1].plus(new)
        self._seen.append((now, self.total))
        while len(self._seen) > 2 and self._seen[1][0] < now - RATE_SECONDS:
            self._seen.popleft()

    @property
    def rate(self) -> float | None:
        """Messages per second over the last minute; None if that is not known yet."""
        if len(self._seen) < 2 or self._seen[-1][0] - self._seen[0][0] < 1:
            return None
        (since, first), (until, last) = self._seen[0], self._seen[-1]
        return (sum(last) - sum(first)) / (until - since)


class History:
    def __init__(self) -> None:
        self.consumers: dict[str, ConsumerHistory] = {}

    def add(self, counts: Mapping[str, Mapping[Hashable, Counted]]) -> None:
        """Note what each worker has done so far, by consumer."""
        now = time.time()
        for name, workers in counts.items():
            self.consumers.setdefault(name, ConsumerHistory()).add(workers, now)

    def of(self, consumer: str) -> ConsumerHistory:
        return self.consumers.get(consumer) or ConsumerHistory()
