"""Attempts under a time limit, all watched by one watchdog per call; and the engine's clock.

An attempt costs a dict entry, but no timer, thread or task. The watchdog sleeps until the earliest deadline it knows.
Most attempts end long before theirs, so when it wakes it mostly finds newer ones, and sleeps again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple

from onceward.task.cancellation import CancelToken
from onceward.task.script import ENDING, Failed, TimeLimit
from onceward.task.work import ENDED, Life, Work


def first_limit(work: Work, timeout: float | None, now: float) -> tuple[float, TimeLimit]:
    """When an attempt that starts now has to end, and which limit sets that time."""
    if timeout is not None and now + timeout < work.deadline:
        return now + timeout, TimeLimit.STEP
    return work.deadline, work.limit


def is_too_late(work: Work, due: float, limit: TimeLimit, now: float) -> bool:
    """Whether an attempt is not made, because its time is over. The exception handler is entered once even then."""
    return due <= now and not (work.handling and work.attempt == 0 and limit is TimeLimit.TRANSACTION)


class Try(CancelToken, eq=False, kw_only=True):
    """One attempt under a time limit: running, then perhaps expired, then perhaps stuck."""

    work: Work
    due: float
    """When the watchdog has to act next."""

    @property
    def hurried(self) -> bool:
        return self.limit is TimeLimit.HURRY

    def expire(self) -> bool:
        """Claim the attempt as out of time; `interrupt` follows. False if it has just ended."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Ask it to stop."""
        raise NotImplementedError

    def give_up(self) -> bool:
        """Stop waiting for the attempt, which is stuck. False if it has just ended."""
        raise NotImplementedError


class TaskTry(Try, eq=False, kw_only=True):
    """An attempt in a task. The event loop runs one step at a time, so plain attributes are race-free."""

    task: asyncio.Task[Any]
    stuck: bool = False
    awaited: Any = None

    def expire(self) -> bool:
        return True

    def interrupt(self) -> None:
        self.cancel()
        self.task.cancel()

    def give_up(self) -> bool:
        self.stuck = True
        return True


def forget_token(this: Try) -> None:
    """An attempt has ended: its life does not refer to it any more, or only the garbage collector could free them. What
    it leaves running still sees that it was cut off."""
    if isinstance(this.work, Life) and not this.expired:
        this.work.marks = None


class RunningAttempt(NamedTuple):
    """An attempt that runs now, for operators."""

    transaction_id: str
    step: str
    number: int
    """From 0."""
    stuck: bool
    """It was asked to stop, did not, and was given up on."""
    stack: Callable[[], str]
    """Where its code is."""


class Deadlines:
    """The attempts in flight, by the thread or task they run in."""

    def __init__(
        self,
        stuck_grace: float,
        on_expiry: Callable[[Work, TimeLimit], None],
        make: Callable[[Life], Try],
    ) -> None:
        """`make` makes the token of a life that has none."""
        self._make = make
        self.tries: dict[Any, Try | Life] = {}
        """A life stands for a first attempt without a time limit: see `Life.marks`."""
        self.watch_at = inf
        """An attempt due before this must poke the watchdog."""
        self._stuck_grace = stuck_grace
        self._on_expiry = on_expiry
        self.hurried = False
        """Cut off every attempt at a transaction, and make no more."""

    def attempts(self, stack_of: Callable[[Any], str]) -> list[RunningAttempt]:
        """The attempts at transactions that run now, with the stack of each. From any thread."""
        return [
            _describe(this.work, this, partial(stack_of, this))
            for this in map(self._opened, list(self.tries.values()))
            if this is not None and isinstance(this.work, Life)
        ]

    def token_of(self, life: Life) -> Try | None:
        """The token of a first attempt that may not have one yet; None if it has ended without one. From any thread."""
        marks = life.marks
        if marks is None:
            return None
        if not marks:
            marks.append(self._make(life))
        return None if marks[0] is ENDED else marks[0]

    def _opened(self, this: Try | Life) -> Try | None:
        return self.token_of(this) if isinstance(this, Life) else this

    def check(self, now: float) -> float:
        """Act on what is due, and return when to check next."""
        # During the check every new attempt pokes, so none is missed before the watchdog sleeps.
        self.watch_at = inf
        nearest = inf
        if self.hurried:
            self._cut_off(now)
        for each in list(self.tries.values()):
            this = each if not isinstance(each, Life) else self.token_of(each) if each.marks else None
            if this is None:
                continue
            if this.due <= now:
                self._act(this, now)
            nearest = min(nearest, this.due)
        self.watch_at = nearest
        return nearest

    def forgive(self, seconds: float) -> None:
        """Give this time back to every attempt that is running."""
        for this in self.tries.values():
            if not isinstance(this, Life) and this.limit not in ENDING:
                this.due += seconds

    def hurry(self) -> None:
        """Make the next check cut off every attempt at a transaction."""
        # Only the watchdog acts: an attempt that is due right now must have one reason to end.
        self.hurried = True

    def refuse(self, work: Work) -> Failed:
        """The reply to an attempt that is not made, because the call was hurried."""
        self._on_expiry(work, TimeLimit.HURRY)
        return Failed(None, TimeLimit.HURRY)

    def _cut_off(self, now: float) -> None:
        for this in map(self._opened, list(self.tries.values())):
            # Calls to the source may finish.
            if this is not None and not this.expired and type(this.work) is Life:
                this.limit, this.due = TimeLimit.HURRY, now

    def _act(self, this: Try, now: float) -> None:
        if this.expired:
            this.due = inf
            # Count first: once given up, the stuck driver may return and leave at any moment.
            this.work.count_drivers(+1)
            if this.give_up():
                this.work.stuck = True
                this.work.resume(Failed(None, this.limit, stuck=True))
            else:
                this.work.count_drivers(-1)
        else:
            # If the call is ending, no attempt follows that would have to wait, so no grace.
            this.due = inf if this.limit in ENDING else now + self._stuck_grace
            if this.expire():
                try:
                    self._on_expiry(this.work, this.limit)
                finally:
                    this.interrupt()
            else:
                this.due = inf


def _describe(life: Life, this: Try, stack: Callable[[], str]) -> RunningAttempt:
    stuck = this.expired and life.stuck
    # Another driver has gone on with a life that is stuck, and is at another step.
    fields = getattr(life, "stuck_fields", {}) if stuck else {}
    step, number = fields.get("step", life.step), fields.get("attempt", life.attempt)
    return RunningAttempt(life.transaction_id, step, number, stuck, stack)


class Clock:
    """The engine's time. Tests may replace it with `onceward.testing.FakeClock`."""

    now = staticmethod(time.monotonic)
    """Seconds on a monotonic clock."""
    stands_still = False
    """Whether time passes only between calls, so a call ends instead of waiting for a time."""

    def sleeping(self, seconds: float) -> float:
        """Called before the engine sleeps for a backoff; returns how long to really sleep."""
        return seconds
