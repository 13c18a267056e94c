"""The boundaries of a delivery, the faults that may happen there, and the probe that injects them.

The probe wraps one instance of the consumer and, during a call, its session; the code of both stays the user's and the
inbox's own. It also counts the writes and effects of the handler.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from typing import Any, Literal

import msgspec

from onceward._sync import as_coroutine, as_function
from onceward.db import LockTimeoutError, operations
from onceward.inbox import Done, EffectRefused
from onceward.outbox.outbox import HandlerSends
from onceward.task.base import AsyncTask
from onceward.verify.children import Watchdog
from onceward.verify.failures import failed_statement
from onceward.verify.watch import blockade
from onceward.verify.watch.background import note_left_by_effect, note_left_running
from onceward.verify.watch.calls import ADDRESS, OutsideCall, WatchedEffect, recording
from onceward.verify.watch.escapes import in_session
from onceward.verify.watch.inheritance import note_writes
from onceward.verify.watch.intrusions import Phase, Scope, during, during_effect, note_temporary
from onceward.verify.watch.keys import ignores_key, waives_key
from onceward.verify.watch.statements import is_query, only_reads

_ALWAYS_WRITES = (operations.insert_idempotent, operations.occ_update)
_WAITS = (operations.lock_row, operations.advisory_lock)
_MAY_WRITE = (
    operations.execute,
    operations.execute_scalar,
    operations.fetch_one,
    operations.fetch_all,
    operations.statement,
)
_LOCKS = re.compile(
    r"\bfor\s+(no\s+key\s+)?(update|(key\s+)?share)\b|\bpg_advisory_xact_lock(_shared)?\s*\(|^\s*lock\b",
    re.IGNORECASE,
)
"""Statements that wait for a lock, and fail if it is not released in time."""

Adapt = Callable[[Callable[..., Any]], Callable[..., Any]]


class DeliveryBoundary(StrEnum):
    """A point of a delivery where a fault can happen, as findings describe it."""

    BEFORE_DEDUP = "before the dedup decision"
    BEFORE_HANDLER = "before the handler"
    QUERY_FAILS = "instead of query"
    LOCK_FAILS = "instead of lock"
    STATEMENT_FAILS = "instead of write"
    AFTER_WRITE = "after write"
    EFFECT_FAILS = "instead of effect"
    CALL_FAILS = "instead of the first call of a service in effect"
    RECONCILE_FAILS = "instead of the first call of a service in reconcile of effect"
    AFTER_EFFECT = "after effect"
    BEFORE_COMMIT = "before the commit"
    AFTER_COMMIT = "after the commit, before the acknowledgement"


IN_EFFECTS = (DeliveryBoundary.EFFECT_FAILS, DeliveryBoundary.AFTER_EFFECT)
STATEMENTS = (DeliveryBoundary.QUERY_FAILS, DeliveryBoundary.LOCK_FAILS, DeliveryBoundary.STATEMENT_FAILS)
"""Statements that fail. A handler may try these again."""


class Fault(msgspec.Struct, frozen=True):
    """An exception, a kill or a pause at a boundary. Writes and effects are numbered from 1; to send a message is a
    write."""

    boundary: DeliveryBoundary
    number: int = 0
    action: Literal["raise", "kill", "hold"] = "raise"
    lasts: bool = False
    """Whether it happens to those after it, too, until the delivery ends. Otherwise it happens once."""
    state: str = ""
    """The SQLSTATE of a statement that fails, or the name of its code on SQLite."""

    def __str__(self) -> str:
        which = f" {self.number}" if self.number else ""
        kind = "" if self.state.startswith("SQLITE_") else "SQLSTATE "
        state = f", with {kind}{self.state}" if self.state else ""
        return f"{self.boundary}{which}{' and those after it' if self.lasts else ''}{state}"

    def hits(self, boundary: DeliveryBoundary, number: int) -> bool:
        return self.boundary is boundary and (self.number == number or (self.lasts and number > self.number))


class Injected(Exception):
    """Raised by the kit at a boundary. No handler expects it, and none may swallow it."""


class InjectedInEffect(Injected, ConnectionError, TimeoutError, LookupError, ValueError, RuntimeError):
    """Instead of an effect or after it. Whatever a handler catches around an effect, it catches this."""


def handler_faults(
    writes: int, effects: int, action: Literal["raise", "kill"], locks: int = 0
) -> list[Fault]:
    """Faults in and around a handler with this many writes, effects and locks."""
    found = [Fault(DeliveryBoundary.BEFORE_HANDLER, 0, action)] if action == "raise" else []
    found += [Fault(DeliveryBoundary.LOCK_FAILS, number, action) for number in range(1, locks + 1)]
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
        self.hold: Callable[[], None] = lambda: None
        """What a fault that holds the transaction open waits for."""
        self._drivers: Callable[[], frozenset[str]] = frozenset
        """The drivers whose connections the handler has got, by the names of their modules."""
        self.begin(None)

    def begin(self, fault: Fault | None) -> None:
        """Begin a new delivery."""
        self.fault = fault
        self.writes = 0
        self.queries = 0
        self.locks = 0
        self.effects = 0
        self.touched = False
        """Whether a write affected a row."""
        self.called = False
        """Whether the handler was called."""
        self.has_struck = False
        """Whether the fault was raised."""
        self.fired_inside = False
        """Whether the fault was raised by a call that the handler made."""
        self.swallowed = False
        """Whether the handler returned normally after that."""
        self.result: Any = None
        self.calls: list[OutsideCall] = []
        """Calls of outside services in effects."""
        self.keyless: list[str] = []
        """Effects whose call does not read its key, and that nothing reconciles."""
        self.scopes: list[Scope] = []
        """The user's steps of this delivery, with what they started."""
        self.misjudged: list[str] = []
        """Effects that were called refused, although the provider gave no answer."""
        self.rekeyed: list[OutsideCall] = []
        """Calls that were made again with another key, although the provider gave no answer."""
        self.unheard: list[str] = []
        """Effects that returned, although the provider gave no answer to their only call."""
        self.assumed: list[str] = []
        """Effects that reconcile called done or refused, although the provider gave no answer."""
        self.said: list[str] = []
        """The statements of the writes."""
        self.unsent: BaseException | None = None
        """Why a message was not sent, and none after it."""
        self.returned = False
        """Whether the handler returned."""

    def reach(
        self, boundary: DeliveryBoundary, number: int = 0, *, inside: bool = False, waits: bool = False
    ) -> None:
        """Raise or kill, if the fault of this delivery belongs here. `waits`: in a helper that waits for a lock."""
        fault = self.fault
        if fault is None or not fault.hits(boundary, number):
            return
        if not fault.lasts:
            self.fault = None
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "hold":
            self.hold()
            return
        self.has_struck, self.fired_inside = True, inside
        kind = InjectedInEffect if boundary in IN_EFFECTS else Injected
        error = kind(f"raised by the verification {fault}")
        if waits:
            raise LockTimeoutError(str(error))
        if boundary in STATEMENTS:
            raise failed_statement(error, self._drivers(), fault.state)
        raise error

    # ── the consumer ────────────────────────────────────────────────────────────────────────────────────

    def attach(self, task: Any) -> None:
        """Written for asyncio; in threads the calls of both sides are adapted."""
        asynchronous = isinstance(task, AsyncTask)
        inner, outer = (_as_it_is, _as_it_is) if asynchronous else (as_coroutine, as_function)
        process = inner(task.process_transaction)

        async def process_transaction(transaction: Any, session: Any) -> Any:
            self.called, self.fired_inside = True, False  # the inbox may call it again, after a deadlock
            self.reach(DeliveryBoundary.BEFORE_HANDLER)
            coroutine = process(transaction, session)
            if asynchronous:
                self._watchdog.coroutine = coroutine
            try:
                with self._observing(session, inner, outer), self._step(Phase.HANDLER, coroutine):
                    self.result = await coroutine
            finally:
                self._watchdog.coroutine = None
            self.swallowed = self.fired_inside
            self.returned = True
            note_temporary()
            self.reach(DeliveryBoundary.BEFORE_COMMIT)
            return self.result

        task.process_transaction = outer(process_transaction)
        task.handle_transaction_success = outer(
            self._after(inner(task.handle_transaction_success), Phase.SUCCESS)
        )
        task.handle_transaction_exception = outer(
            self._after(inner(task.handle_transaction_exception), Phase.FAILURE)
        )

    def _after(self, handle: Callable[..., Any], phase: Phase) -> Callable[..., Any]:
        """One of the handlers that run when the transaction has ended."""

        async def handle_and_watch(transaction: Any, result_or_error: Any) -> Any:
            if phase is Phase.SUCCESS:
                self.reach(DeliveryBoundary.AFTER_COMMIT)
            coroutine = handle(transaction, result_or_error)
            with self._step(phase, coroutine):
                return await coroutine

        return handle_and_watch

    @contextmanager
    def _step(self, phase: Phase, coroutine: Any) -> Iterator[None]:
        """A step of user code. What it starts must have ended when it returns."""
        with during(phase, coroutine=coroutine) as scope:
            self.scopes.append(scope)
            try:
                yield
            finally:
                note_writes()
        note_left_running(scope)

    # ── its session ─────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _observing(self, session: Any, inner: Adapt, outer: Adapt) -> Iterator[None]:
        run, effect, send = inner(session.run), inner(session.effect), inner(session.send)

        async def observed(operation: Any, *args: Any, **more: Any) -> Any:
            number = self._before(operation, args)
            with during(Phase.OFF), nullcontext() if _sends(operation) else in_session():
                result = await run(operation, *args, **more)
            if number:
                changed = getattr(result, "rowcount", result)  # an ORM or a driver gets its own result
                # -1: unknown, as for CREATE TABLE. A query returns rows, whatever its functions do.
                self.touched |= bool(changed) and changed != -1 and not is_query(str(args[0]))
                self.reach(DeliveryBoundary.AFTER_WRITE, number, inside=True)
            return result

        async def effecting(name: str, call: Callable[[str], Any], **more: Any) -> Any:
            number = self._next_effect()
            if more.get("reconcile") is None and ignores_key(call):
                self.keyless.append(name)

            async def called(key: str) -> Any:
                self.reach(DeliveryBoundary.EFFECT_FAILS, number, inside=True)
                unanswered = self.fault == Fault(DeliveryBoundary.CALL_FAILS, number)
                made = len(self.calls)
                with (
                    blockade.in_effect(name),
                    during_effect() as scope,
                    recording(name, key, self.calls, unanswered=unanswered) as effect,
                ):
                    try:
                        result = await inner(call)(key)
                    except EffectRefused:
                        if effect.lost is not None and len(self.calls) == made:  # another call may be refused
                            self.misjudged.append(name)
                        raise
                    finally:
                        self.has_struck |= effect.lost is not None
                        if effect.rekeyed is not None:
                            self.rekeyed.append(effect.rekeyed)
                note_left_by_effect(name, scope)
                if effect.lost is not None and len(self.calls) == made and not waives_key(call):
                    self.unheard.append(name)
                note_writes()  # allowed here
                self.reach(DeliveryBoundary.AFTER_EFFECT, number, inside=True)
                return result

            reconcile = more.pop("reconcile", None)

            async def reconciled(key: str) -> Any:
                unanswered = self.fault == Fault(DeliveryBoundary.RECONCILE_FAILS, number)
                with recording(name, key, [], unanswered=unanswered) as asked:
                    try:
                        answer = await inner(reconcile)(key)
                    except EffectRefused:
                        self._note_assumed(asked)
                        raise
                if isinstance(answer, Done):
                    self._note_assumed(asked)
                return answer

            if reconcile is not None:
                more["reconcile"] = outer(reconciled)
            note_writes()
            with during(Phase.OFF):
                return await effect(name, outer(called), **more)

        async def sending(*args: Any, **more: Any) -> Any:
            try:
                sent = await send(*args, **more)
            except Exception as error:
                self.unsent = error
                raise
            self.unsent = None
            return sent

        async def unobserved(operation: Any, *args: Any, **more: Any) -> Any:
            with during(Phase.OFF):
                return await run(operation, *args, **more)

        self._drivers = lambda: frozenset(
            each.kind.family for each in session.guests if each.kind.family != "orm"
        )
        session.run, session.effect, session.send = outer(observed), outer(effecting), outer(sending)
        try:
            yield
        finally:
            # The inbox continues with the session, and so may a task that the handler did not wait for.
            session.run = outer(unobserved)
            del session.effect, session.send

    def _before(self, operation: Any, args: tuple[Any, ...]) -> int:
        """The number of the write that is about to happen; 0 if the operation only reads."""
        waits = operation in _WAITS
        if waits or (operation in _MAY_WRITE and _LOCKS.search(str(args[0]))):
            self.locks += 1
            self.reach(DeliveryBoundary.LOCK_FAILS, self.locks, inside=True, waits=waits)
        if not _writes(operation, args):
            if operation in _MAY_WRITE and is_query(str(args[0])):
                self.queries += 1
                self.reach(DeliveryBoundary.QUERY_FAILS, self.queries, inside=True)
            return 0
        self.writes += 1
        self.said.append(ADDRESS.sub("", f"{args[0]} {args[1:]}"))
        self.reach(DeliveryBoundary.STATEMENT_FAILS, self.writes, inside=True)
        return self.writes

    def _note_assumed(self, asked: WatchedEffect) -> None:
        """Reconcile knows an answer. It cannot have got it, if its only call was not answered."""
        if asked.lost is not None and not asked.calls:
            self.assumed.append(asked.name)

    def _next_effect(self) -> int:
        self.effects += 1
        return self.effects


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _sends(operation: Any) -> bool:
    """Whether the inbox writes a message of the handler."""
    return getattr(operation, "__func__", None) is HandlerSends.write


def _writes(operation: Any, args: tuple[Any, ...]) -> bool:
    if operation in _ALWAYS_WRITES or _sends(operation):
        return True
    return operation in _MAY_WRITE and not only_reads(str(args[0]))
