"""A clock that tests can read and move."""

from __future__ import annotations

from onceward.task.deadlines import Clock


class FakeClock(Clock):
    """A clock whose sleeps take no time: `sleeps` records them, and the clock jumps ahead."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self._now

    def __call__(self) -> float:
        """The time, for callers that take a clock as a function, such as connectors."""
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def sleeping(self, seconds: float) -> float:
        self.sleeps.append(seconds)
        self._now += seconds
        return 0.0
