"""Attempts under a time limit, all watched by one watchdog per call.

Entering an attempt is a dict entry, leaving it another; there is no timer, thread or task per attempt. The
watchdog sleeps until the earliest deadline it knows of. Since most attempts end long before theirs, it
mostly finds younger ones when it wakes, and sleeps again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

from onceward.task.script import ENDING, Failed, Limit
from onceward.task.work import Life, Work


def first_limit(work: Work, timeout: float | None, now: float) -> tuple[float, Limit]:
    """When an attempt that starts now has to end, and which of its limits says so."""
    if timeout is not None and now + timeout < work.deadline:
        return now + timeout, Limit.STEP
    return work.deadline, work.limit


class Try:
    """One attempt under a time limit: first it runs, then it may be overdue, then it may be stuck."""

    __slots__ = ("due", "expired", "limit", "work")

    def __init__(self, work: Work, due: float, limit: Limit) -> None:
        self.work = work
        self.due = due
        """When the watchdog has to act next."""
        self.limit = limit
        self.expired = False

    @property
    def hurried(self) -> bool:
        return self.limit is Limit.HURRY

    def expire(self) -> bool:
        """Ask the attempt to stop, unless it has just ended: whether it was asked."""
        raise NotImplementedError

    def give_up(self) -> bool:
        """Stop waiting for the attempt, unless it has just ended: whether it is stuck."""
        raise NotImplementedError


class Deadlines:
    """The attempts in hand, by the thread or task they run in."""

    def __init__(self, stuck_grace: float, on_expiry: Callable[[Work, Limit], None]) -> None:
        self.tries: dict[Any, Try] = {}
        self.watch_at = inf
        """Whoever enters an attempt due before this pokes the watchdog."""
        self._stuck_grace = stuck_grace
        self._on_expiry = on_expiry
        self._hurried = False

    def look(self, now: float) -> float:
        """Act on what is due, and say when to look again."""
        # While it looks around, every newcomer pokes: none can slip past between look and sleep.
        self.watch_at = inf
        nearest = inf
        if self._hurried:
            self._hurried = False
            self._cut_off(now)
        for this in list(self.tries.values()):
            if this.due <= now:
                self._act(this, now)
            nearest = min(nearest, this.due)
        self.watch_at = nearest
        return nearest

    def hurry(self) -> None:
        """Have the next look cut off every attempt at a transaction."""
        # By the watchdog, and nobody beside it: an attempt that is due at this moment has one reason to end.
        self._hurried = True

    def _cut_off(self, now: float) -> None:
        for this in list(self.tries.values()):
            # What the source is being told may be told to its end.
            if not this.expired and type(this.work) is Life:
                this.limit, this.due = Limit.HURRY, now

    def _act(self, this: Try, now: float) -> None:
        if this.expired:
            this.due = inf
            # Counted before: the moment it is given up, the stuck one may return and leave.
            this.work.count_drivers(+1)
            if this.give_up():
                this.work.stuck = True
                this.work.resume(Failed(None, this.limit, stuck=True))
            else:
                this.work.count_drivers(-1)
        else:
            # Where the call ends, there is no next attempt to hold back, so no grace.
            this.due = inf if this.limit in ENDING else now + self._stuck_grace
            if this.expire():
                self._on_expiry(this.work, this.limit)
            else:
                this.due = inf


# Time as the engine sees it: the one thing, with randomness, that a test may replace.


class Clock:
    """The real clock. `onceward.testing.FakeClock` replaces it in tests."""

    now = staticmethod(time.monotonic)
    """Seconds on a clock that never goes back."""

    def sleeping(self, seconds: float) -> float:
        """Told before the engine sleeps out a backoff; answers how long it shall really sleep."""
        return seconds
