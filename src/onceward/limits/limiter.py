"""What waits for a limit and what runs under it, in one process.

A message goes to the engine when its start is due and it has a slot; until then it waits.

    source ─► waiting, by key ─► reserved: it has a slot, and a time to start ─► started ─► the slot is free
                  │                                                              (or handed to the next of its key)
                  └─► more than its key can start soon: back to the source, to come again at a time of its own

Nothing waits in a slot of the engine, so other keys go on, and nothing that waits has begun: no attempt, no delivery.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, ClassVar, Final

import msgspec

from onceward._process.bell import Bell
from onceward.limits.limit import KeyProblem, KeyReader
from onceward.limits.records import AHEAD, LimitRecords
from onceward.middleware import Middleware, StepCall, StepInfo
from onceward.task.exceptions import Postponed
from onceward.telemetry.context import current_work
from onceward.transaction import Transaction

LATE: Final = 0.25
"""Seconds after its time that a start is given up: too many at once would follow."""
MOMENT: Final = 0.05
"""Seconds that a free slot is left to the next of its key."""


class StartMissed(Postponed):
    """It cannot start now: its time has passed, or its slot is lost. Nothing is counted."""

    quiet: ClassVar[bool] = True


class Queued(msgspec.Struct, eq=False):
    """A message that waits for its start."""

    transaction: Transaction
    since: float


class Started(msgspec.Struct, eq=False):
    """A message that has its start."""

    transaction: Transaction
    key: str
    due: float
    token: str | None
    since: float
    """When it began to wait."""
    begun: float | None = None


class Freed(msgspec.Struct):
    """A slot that nobody needs here."""

    key: str
    seconds: float | None
    """That a handler took."""
    at: float


class Limiter:
    """What waits and what runs of one consumer. Shared by the middleware of its source and of its steps."""

    def __init__(self, keys: KeyReader, records: LimitRecords) -> None:
        self.keys, self.records = keys, records
        self.bell = Bell()
        self.rang = False
        self.lock = threading.Lock()
        """For all below."""
        self.waiting: dict[str, deque[Queued]] = {}
        """By key. No line is empty."""
        self.reserved: list[Started] = []
        self.running: dict[int, Started] = {}
        """Given to the engine and not ended, by the identity of the transaction."""
        self.leases: dict[str, float] = {}
        """Until when each slot of this process is surely its own, by its own clock."""
        self.freed: dict[str, Freed] = {}
        self.spare: dict[str, deque[str]] = {}
        """Slots that the next of their key gets without asking."""
        self.problems: dict[str, list[KeyProblem]] = {}
        """Of messages without a key, by their id. Each fails when its turn comes."""
        self.look_at: dict[str, float] = {}
        """When to ask the database again for a key that waits."""

    def waiting_now(self) -> tuple[int, float | None]:
        """How many messages wait here for their limit, and since when the oldest does."""
        with self.lock:
            since = [line[0].since for line in self.waiting.values()] + [each.since for each in self.reserved]
            number = sum(map(len, self.waiting.values())) + len(self.reserved)
        return number, min(since, default=None)

    def begin_step(self, transaction: Transaction, now: float) -> None:
        """A handler is about to run. Raises `StartMissed` if it must not."""
        run = self.running.get(id(transaction))
        if run is None or run.begun is not None:
            return  # it has no key, or this is the same start again
        if now > run.due + AHEAD:
            raise StartMissed("its time to start has passed", LATE)
        if run.token is not None and now > self.leases.get(run.token, -inf):
            raise StartMissed("its slot is lost", LATE)
        run.begun = now

    def end(self, transaction: Transaction, now: float) -> None:
        """The handler has ended, and is not called again: its slot is free. A second call does nothing."""
        with self.lock:
            run = self.running.pop(id(transaction), None)
            if run is None:
                return
            took = None if run.begun is None else now - run.begun
            if run.token is not None and run.key in self.waiting and self.records.hands_over:
                self.spare.setdefault(run.key, deque()).append(run.token)
            elif run.token is not None:
                self.free(run.token, run.key, now, took)
            self.look_at.pop(run.key, None)
            self.rang = True
        self.bell.ring()

    async def sleep(self, seconds: float, *, asynchronous: bool, unless: Callable[[], bool]) -> None:
        """Wait until the bell rings, or so long; not at all if it is time already."""
        if asynchronous:
            with self.bell.heard_async() as ear:
                if seconds > 0 and not unless():
                    await ear.wait(seconds)
        else:
            with self.bell.heard() as blocking_ear:
                if seconds > 0 and not unless():
                    blocking_ear.wait(seconds)

    def free(self, token: str, key: str, now: float, seconds: float | None = None) -> None:
        """Call it, and those below, with the lock."""
        if self.leases.pop(token, None) is not None:
            self.freed[token] = Freed(key, seconds, now)

    def free_spares(self, key: str, now: float) -> None:
        for token in self.spare.pop(key, ()):
            self.free(token, key, now)

    def take_freed(self, now: float = inf) -> dict[str, Freed]:
        """The slots to be freed now. One whose key waits is left to the loop, for a moment: it asks for the next."""
        taken = {
            token: each
            for token, each in self.freed.items()
            if each.key not in self.waiting or now - each.at >= MOMENT
        }
        for token in taken:
            del self.freed[token]
        return taken


class LimitedSteps(Middleware):
    """Begins a message only at its time, and frees its slot when its handler has ended."""

    name = "limit"

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    def bind(self, task: Any) -> Middleware:
        self._now = task.clock.now
        return self

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        if step.name != "process":
            return call
        limiter, repeats = self._limiter, step.max_attempts > 1

        async def process(transaction: Transaction, *more: Any) -> Any:
            limiter.begin_step(transaction, self._now())
            # What is decided together with others may be made again: its slot is freed when it is settled.
            alone = getattr(current_work.get(), "unit", None) is None
            try:
                result = await call(transaction, *more)
            except BaseException:
                if alone and not repeats:
                    limiter.end(transaction, self._now())
                raise
            if alone:
                limiter.end(transaction, self._now())
            return result

        return process
