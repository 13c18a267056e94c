"""The boundaries of a delivery, the faults that may happen there, and the probe that injects them.

The probe wraps one instance of the consumer and, during a call, its session; the code of both stays the user's and the
inbox's own. It also counts the writes and effects of the handler.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Literal

import msgspec
from sqlalchemy.exc import OperationalError
from sqlalchemy.sql import Select

from onceward._sync import as_coroutine, as_function
from onceward.db import operations
from onceward.task.base import AsyncTask
from onceward.verify import intrusions
from onceward.verify.children import Watchdog
from onceward.verify.intrusions import Phase, during

_ALWAYS_WRITES = (operations.insert_idempotent, operations.occ_update)
_MAY_WRITE = (operations.execute, operations.execute_scalar, operations.fetch_one, operations.fetch_all)
_READS = re.compile(r"\s*(select|values|show|pragma)\b", re.IGNORECASE)


Adapt = Callable[[Callable[..., Any]], Callable[..., Any]]


class DeliveryBoundary(StrEnum):
    """A point of a delivery where a fault can happen, as findings describe it."""

    BEFORE_DEDUP = "before the dedup decision"
    BEFORE_HANDLER = "before the handler"
    STATEMENT_FAILS = "instead of write"
    AFTER_WRITE = "after write"
    EFFECT_FAILS = "instead of effect"
    AFTER_EFFECT = "after effect"
    BEFORE_COMMIT = "before the commit"
    AFTER_COMMIT = "after the commit, before the acknowledgement"


class Fault(msgspec.Struct, frozen=True):
    """An exception or a kill, once, at a boundary. Writes and effects are numbered from 1."""

    boundary: DeliveryBoundary
    number: int = 0
    action: Literal["raise", "kill"] = "raise"

    def __str__(self) -> str:
        return f"{self.boundary} {self.number}" if self.number else str(self.boundary)


class Injected(Exception):
    """Raised by the kit at a boundary. No handler expects it, and none may swallow it."""


def handler_faults(writes: int, effects: int, action: Literal["raise", "kill"]) -> list[Fault]:
    """Faults in and around a handler with this many writes and effects."""
    found = [Fault(DeliveryBoundary.BEFORE_HANDLER, 0, action)] if action == "raise" else []
    for number in range(1, effects + 1):
        if action == "raise":
            found.append(Fault(DeliveryBoundary.EFFECT_FAILS, number, action))
        found.append(Fault(DeliveryBoundary.AFTER_EFFECT, number, action))
    for number in range(1, writes + 1):
        if action == "raise":
            found.append(Fault(DeliveryBoundary.STATEMENT_FAILS, number, action))
        found.append(Fault(DeliveryBoundary.AFTER_WRITE, number, action))
    return [
        *found,
        Fault(DeliveryBoundary.BEFORE_COMMIT, 0, action),
        Fault(DeliveryBoundary.AFTER_COMMIT, 0, action),
    ]


class Probe:
    """Watches one delivery at a time, and injects its fault."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self.begin(None)

    def begin(self, fault: Fault | None) -> None:
        """Begin a new delivery."""
        self.fault = fault
        self.writes = 0
        self.effects = 0
        self.called = False
        """Whether the handler was called."""
        self.fired_inside = False
        """Whether the fault was raised by a call that the handler made."""
        self.swallowed = False
        """Whether the handler returned normally after that."""
        self.result: Any = None

    def reach(self, boundary: DeliveryBoundary, number: int = 0, *, inside: bool = False) -> None:
        """Raise or kill, if the fault of this delivery belongs here."""
        fault = self.fault
        if fault is None or fault.boundary is not boundary or fault.number != number:
            return
        self.fault = None
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.fired_inside = inside
        error = Injected(f"raised by the verification {fault}")
        if boundary is DeliveryBoundary.STATEMENT_FAILS:
            raise OperationalError("a statement of the handler", None, error)
        raise error

    # ── the consumer ────────────────────────────────────────────────────────────────────────────────────

    def attach(self, task: Any) -> None:
        """Written for asyncio; in threads the calls of both sides are adapted."""
        asynchronous = isinstance(task, AsyncTask)
        inner, outer = (_as_it_is, _as_it_is) if asynchronous else (as_coroutine, as_function)
        process, succeed = inner(task.process_transaction), inner(task.handle_transaction_success)

        async def process_transaction(transaction: Any, session: Any) -> Any:
            self.called = True
            self.reach(DeliveryBoundary.BEFORE_HANDLER)
            coroutine = process(transaction, session)
            if asynchronous:
                self._watchdog.coroutine = intrusions.coroutine = coroutine
            try:
                with self._observing(session, inner, outer), during(Phase.HANDLER):
                    self.result = await coroutine
            finally:
                self._watchdog.coroutine = intrusions.coroutine = None
            self.swallowed = self.fired_inside
            self.reach(DeliveryBoundary.BEFORE_COMMIT)
            return self.result

        async def handle_transaction_success(transaction: Any, result: Any) -> None:
            self.reach(DeliveryBoundary.AFTER_COMMIT)
            with during(Phase.OFF):
                await succeed(transaction, result)

        task.process_transaction = outer(process_transaction)
        task.handle_transaction_success = outer(handle_transaction_success)

    # ── its session ─────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _observing(self, session: Any, inner: Adapt, outer: Adapt) -> Iterator[None]:
        run, effect = inner(session.run), inner(session.effect)

        async def observed(operation: Any, *args: Any, **more: Any) -> Any:
            number = self._before(operation, args)
            with during(Phase.OFF):
                result = await run(operation, *args, **more)
            if number:
                self.reach(DeliveryBoundary.AFTER_WRITE, number, inside=True)
            return result

        async def effecting(name: str, call: Callable[[str], Any], **more: Any) -> Any:
            number = self._next_effect()

            async def called(key: str) -> Any:
                self.reach(DeliveryBoundary.EFFECT_FAILS, number, inside=True)
                result = await inner(call)(key)
                self.reach(DeliveryBoundary.AFTER_EFFECT, number, inside=True)
                return result

            with during(Phase.OFF):
                return await effect(name, outer(called), **more)

        with _replace(session, outer(observed), outer(effecting)):
            yield

    def _before(self, operation: Any, args: tuple[Any, ...]) -> int:
        """The number of the write that is about to happen; 0 if the operation only reads."""
        if not _writes(operation, args):
            return 0
        self.writes += 1
        self.reach(DeliveryBoundary.STATEMENT_FAILS, self.writes, inside=True)
        return self.writes

    def _next_effect(self) -> int:
        self.effects += 1
        return self.effects


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _writes(operation: Any, args: tuple[Any, ...]) -> bool:
    if operation in _ALWAYS_WRITES:
        return True
    if operation not in _MAY_WRITE:
        return False
    sql = args[0]
    return not (isinstance(sql, Select) or _READS.match(str(sql)))


@contextmanager
def _replace(session: Any, run: Any, effect: Any) -> Iterator[None]:
    before = {name: vars(session)[name] for name in ("run", "effect") if name in vars(session)}
    session.run, session.effect = run, effect
    try:
        yield
    finally:
        for name in ("run", "effect"):
            if name in before:
                setattr(session, name, before[name])
            else:
                delattr(session, name)
