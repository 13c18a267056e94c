"""What each consumer did in every minute of the last hour, for sparklines. In memory: a restart begins it again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

MINUTES = 60
RATE_SECONDS = 60.0


class Counted(NamedTuple):
    succeeded: int = 0
    failed: int = 0


class ConsumerHistory:
    def __init__(self) -> None:
        self.minutes: deque[Counted] = deque(maxlen=MINUTES)
        self._minute: int | None = None
        self._seen: deque[tuple[float, Counted]] = deque()

    def add(self, total: Counted, now: float) -> None:
        """Note the counts so far. A count that is lower than before began from zero: a run was started again."""
        before = self._seen[-1][1] if self._seen else total
        new = Counted(*(now - was if now >= was else now for now, was in zip(total, before, strict=True)))
        minute = int(now // 60)
        if self._minute is None:
            self.minutes.append(Counted())
        else:
            self.minutes.extend([Counted()] * min(minute - self._minute, MINUTES))
        self._minute = minute
        last = self.minutes[-1]
        self.minutes[-1] = Counted(last.succeeded + new.succeeded, last.failed + new.failed)
        self._seen.append((now, total))
        while len(self._seen) > 2 and self._seen[1][0] < now - RATE_SECONDS:
            self._seen.popleft()

    @property
    def rate(self) -> float | None:
        """Messages per second over the last minute; None if that is not known yet."""
        if len(self._seen) < 2 or self._seen[-1][0] - self._seen[0][0] < 1:
            return None
        (since, first), (until, last) = self._seen[0], self._seen[-1]
        return max(sum(last) - sum(first), 0) / (until - since)


class History:
    def __init__(self) -> None:
        self.consumers: dict[str, ConsumerHistory] = {}

    def add(self, totals: Mapping[str, Counted]) -> None:
        now = time.time()
        for name, total in totals.items():
            self.consumers.setdefault(name, ConsumerHistory()).add(total, now)

    def of(self, consumer: str) -> ConsumerHistory:
        return self.consumers.get(consumer) or ConsumerHistory()
