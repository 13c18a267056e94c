"""A clock that tests can read and move."""

from __future__ import annotations

from onceward.task.deadlines import Clock


class FakeClock(Clock):
    """Sleeps take no time: they are noted in `sleeps`, and the clock jumps ahead by as much."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self._now

    def __call__(self) -> float:
        """For whoever takes a clock as a function, as connectors do."""
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def sleeping(self, seconds: float) -> float:
        self.sleeps.append(seconds)
        self._now += seconds
        return 0.0
