"""Starts are recorded before the handler runs: a start without an end is a crash, and too many make the event poison.

A start has a lease, so a copy that arrives while the event is in flight gets `Busy` and is not counted. The starts of a
fetched batch are recorded in one transaction. An event whose earlier start has no end is a *suspect*: its start is
recorded only when it is about to run, alone, so a crash does not count against its neighbors or take them with it. The
start after which it would be poison is recorded when nothing else runs in its process: only a killer is poison.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from enum import IntEnum
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from onceward._text import driver_message, quantity
from onceward.db.transaction import DbTransaction, regardless
from onceward.inbox.contract import Contract
from onceward.inbox.errors import AT_ONCE, Breach, Busy, ContractError
from onceward.inbox.event import Event
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Attempts, Key
from onceward.task.cancellation import cancel_requested, on_cancel, raise_if_cancelled
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from onceward.inbox.ports import InboxPorts

_log = OwnLogger(logging.getLogger("onceward.inbox"))

LONGEST_WAIT = 5.0
"""Seconds until a copy checks again whether the event is still in flight, at most."""
PATIENCE = 30.0
"""Seconds a suspect waits for the others. One of them may be stuck; the suspect is then retried later."""


class Company(IntEnum):
    """Whose events may run beside one."""

    ALL = 0
    OTHER_INBOXES = 1
    NONE = 2
    """It is alone in its process."""


class Start(msgspec.Struct, frozen=True):
    token: int
    """The number of this start, unique among the starts of the event."""


class End(NamedTuple):
    key: Key
    token: int
    error: str | None


class AttemptLedger:
    """The starts and ends that one inbox records."""

    def __init__(self, store: Store, ports: InboxPorts) -> None:
        self._store = store
        self._ports = ports
        self._finished: deque[Key] = deque()
        """Done events; removed from the ledger with the next start."""
        self._unwritten: deque[End] = deque()
        """Ends that could not be recorded; retried with the next start."""
        self._open: set[tuple[str, str]] = set()
        """Consumer and tracking id of this inbox's starts that have no end yet. Only their leases are ours."""

    async def expect(self, contract: Contract, keys: Sequence[Key]) -> dict[str, Start]:
        """Record a start for each key, in one transaction. Keys missing from the result must be started separately.

        It does not wait for the disk: these starts are there for processes that die, and the commit of an event takes
        everything before it to the disk. A start that is a claim waits, see `start`.
        """
        if contract.poison_after == 1:
            keys = ()  # each start is the last one, and needs a process of its own

        def expect(transaction: DbTransaction) -> list[tuple[str, int]]:
            # Sorted: workers with copies of the same events wait for each other without a deadlock.
            distinct = sorted(dict(zip(map(attrgetter("tracking_id"), keys), keys, strict=True)).values())
            if not distinct:
                return []
            return self._store.record_starts(transaction, contract.consumer_id, distinct, contract.lease)

        if not keys and not self._finished and not self._unwritten:
            return {}
        starts: dict[str, Start] = {}
        for tracking_id, number in await self._with_leftovers(expect, flushes=False):
            self._open.add((contract.consumer_id, tracking_id))
            starts[tracking_id] = Start(number)
        return starts

    async def start(self, contract: Contract, key: Key, company: Company = Company.ALL) -> Start | None:
        """Record one start. Returns None, and records nothing, if it needs less company: earlier starts have no end.

        Raises `Busy` if the event is in flight elsewhere, and `ContractError` if it is poison.
        """
        # The last start before it is poison needs a process of its own.
        last = contract.poison_after - 1
        at_most = {Company.ALL: min(1, last), Company.OTHER_INBOXES: last, Company.NONE: last + 1}[company]

        def start(transaction: DbTransaction) -> Start | Exception | None:
            attempts = self._store.start(transaction, key, at_most, contract.lease) if at_most else None
            if attempts is not None:
                self._open.add((key.consumer_id, key.tracking_id))
                return Start(attempts.starts)
            found = self._store.attempts(transaction, key)
            if self._store.look_up(transaction, key).digest is not None:
                return Start(found.starts)
            if not found.locked and found.unended >= contract.poison_after:
                return poisoned(key, found.unended)
            if found.locked or company is Company.NONE:
                return in_flight(found, contract.lease)
            return None

        begun: Start | Exception | None = await self._with_leftovers(start)
        if isinstance(begun, Exception):
            raise begun
        return begun

    async def end(self, ends: Sequence[End]) -> None:
        """Record that these attempts ended without success. If that fails, retry with the next start."""
        if not ends:
            return
        self._unwritten.extend(ends)
        for end in ends:
            self._open.discard((end.key.consumer_id, end.key.tracking_id))
        try:
            with regardless():
                await self._with_leftovers(None)
        except Exception as error:  # noqa: BLE001  must not hide the failure that is being recorded
            _log.warning(
                "could not record the ends of %d attempts yet, will retry: %s",
                len(ends),
                driver_message(error),
            )

    async def extend(self, contract: Contract, tracking_ids: Sequence[str]) -> None:
        """Extend the leases of our own starts. Other workers' leases must expire, even if a copy waits here: the
        worker may be dead."""
        ours = [each for each in tracking_ids if (contract.consumer_id, each) in self._open]
        if ours:
            await self._ports.transact(
                self._store.limited(self._store.extend_attempts), contract.consumer_id, ours, contract.lease
            )

    def finish(self, key: Key) -> None:
        self._finished.append(key)
        self._open.discard(key[:2])

    def release(self, key: Key) -> None:
        """Forget a start that has an end, or whose lease the heartbeat keeps."""
        self._open.discard((key.consumer_id, key.tracking_id))

    async def _with_leftovers(
        self, operation: Callable[[DbTransaction], Any] | None, *, flushes: bool = True
    ) -> Any:
        """Run the operation in one transaction with all pending entries, which stay pending until it commits."""
        ends: list[End] = []
        finished: list[Key] = []
        with suppress(IndexError):  # other threads may add and remove entries meanwhile
            while True:
                ends.append(self._unwritten.popleft())
        with suppress(IndexError):
            while True:
                finished.append(self._finished.popleft())

        def write(transaction: DbTransaction) -> Any:
            for (consumer_id, tracking_id, _), token, error in ends:
                identity = {"consumer": consumer_id, "tracking": tracking_id}
                self._store.run(transaction, _END, token=token, error=error, **identity)
            by_consumer: dict[str, list[str]] = {}
            for key in finished:
                by_consumer.setdefault(key.consumer_id, []).append(key.tracking_id)
            for consumer_id, tracking_ids in by_consumer.items():
                self._store.forget_attempts(transaction, consumer_id, tracking_ids)
            return None if operation is None else operation(transaction)

        try:
            return await self._ports.transact(self._store.limited(write, flushes=flushes))
        except BaseException:
            self._unwritten.extendleft(reversed(ends))
            self._finished.extendleft(reversed(finished))
            raise


class Everyone:
    """The events that run in this process, in threads and in asyncio, of all inboxes."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without any, as after a fork."""
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.sleepers: deque[asyncio.Future[None]] = deque()
        self.inside = 0
        self.alone = False
        self.waiting = 0
        """How many wait to be alone."""

    def wake(self) -> None:
        """Call it with the lock."""
        self.changed.notify_all()
        while self.sleepers:
            sleeper = self.sleepers.popleft()
            with suppress(RuntimeError):  # its event loop is closed
                sleeper.get_loop().call_soon_threadsafe(_end_sleep, sleeper)


def _end_sleep(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


everyone = Everyone()
os.register_at_fork(after_in_child=everyone.forget)

_depth: ContextVar[int] = ContextVar("onceward_gate_depth", default=0)
"""A handler may process other events: they are inside with it, and must not wait for it to leave."""


class Gate:
    """Lets the events of an inbox run together, and a suspect alone: it waits until nothing it must not run beside is
    inside, and others wait for its end."""

    def __init__(self) -> None:
        self.inside = 0
        self.alone = False
        self.waiting = 0
        """How many wait to be alone in this inbox."""

    def may_enter(self, company: Company) -> bool:
        """Call it, and the next, with the lock of everyone."""
        if everyone.alone:
            return False
        if company is Company.NONE:
            return everyone.inside == 0
        if everyone.waiting or self.alone:
            return False
        return self.waiting == 0 if company is Company.ALL else self.inside == 0

    def let_in(self, company: Company) -> None:
        self.inside += 1
        everyone.inside += 1
        self.alone = company is Company.OTHER_INBOXES
        everyone.alone = company is Company.NONE

    def await_turn(self, company: Company, number: int) -> None:
        """Count one that begins to wait (1), or has ended waiting (-1). Call it with the lock."""
        self.waiting += number * (company is Company.OTHER_INBOXES)
        everyone.waiting += number * (company is Company.NONE)
        if number < 0:
            everyone.wake()

    def enter_at_once(self, company: Company) -> bool:
        with everyone.lock:
            if not self.may_enter(company):
                return False
            self.let_in(company)
            return True

    def is_inside(self) -> bool:
        """Whether the code that runs here is inside already."""
        return _depth.get() > 0

    def step_back(self) -> None:
        """What has just entered stays, for others; the code that runs here is no longer inside."""
        _depth.set(_depth.get() - 1)

    def step_in(self) -> None:
        """The code that runs here is inside with what has entered for it, until it steps back."""
        _depth.set(_depth.get() + 1)

    def leave(self) -> None:
        depth = _depth.get() - 1
        _depth.set(depth)
        if depth <= 0:
            self.let_out()

    def let_out(self) -> None:
        with everyone.lock:
            self.inside -= 1
            everyone.inside -= 1
            if self.alone or everyone.alone or self.waiting or everyone.waiting:
                self.alone = everyone.alone = False
                everyone.wake()


class BlockingGate(Gate):
    async def enter(self, company: Company) -> bool:
        """Wait for permission to run. Returns False if it took longer than `PATIENCE`."""
        depth = _depth.get()
        if not depth and not self.enter_at_once(company):
            with on_cancel(self._wake):
                if not self._wait(company):
                    return False
        _depth.set(depth + 1)
        return True

    def _wait(self, company: Company) -> bool:
        with everyone.lock:
            self.await_turn(company, 1)
            try:
                everyone.changed.wait_for(lambda: self.may_enter(company) or cancel_requested(), PATIENCE)
                raise_if_cancelled()
                if not self.may_enter(company):
                    return False
                self.let_in(company)
                return True
            finally:
                self.await_turn(company, -1)

    def _wake(self) -> None:
        with everyone.lock:
            everyone.wake()


class AsyncGate(Gate):
    async def enter(self, company: Company) -> bool:
        depth = _depth.get()
        if not depth and not self.enter_at_once(company) and not await self._wait(company):
            return False
        _depth.set(depth + 1)
        return True

    async def _wait(self, company: Company) -> bool:
        until = monotonic() + PATIENCE
        with everyone.lock:
            self.await_turn(company, 1)
        try:
            while True:
                with everyone.lock:
                    if self.may_enter(company):
                        self.let_in(company)
                        return True
                    changed = asyncio.get_running_loop().create_future()
                    everyone.sleepers.append(changed)
                try:
                    await asyncio.wait_for(changed, until - monotonic())
                except TimeoutError:
                    return False
        finally:
            with everyone.lock:
                self.await_turn(company, -1)


def in_flight(found: Attempts, lease: float) -> Busy:
    """Return `Busy` with a delay that grows with the time since the lease was last extended."""
    silent = max(lease - found.locked_for, 0.0) if found.locked else 0.0
    wait = max(AT_ONCE.delay(), min(silent / 4, found.locked_for, LONGEST_WAIT))
    left = f"; its lease expires in {found.locked_for:.0f} s" if found.locked_for >= 1 else ""
    return Busy(f"another copy of it is in flight, or was when its process died{left}", delay=wait)


def with_token(event: Event, start: Start, *, own: bool = False) -> Event:
    """Return the event with the inbox's own token, for a source without one. `own`: nobody else has this object."""
    # Not `replace`, which would check all fields.
    claimed: Event = event if own else event.__copy__()  # type: ignore[attr-defined]
    msgspec.structs.force_setattr(claimed, "lock_token", str(start.token))
    return claimed


def poisoned(key: Key, starts: int) -> ContractError:
    return ContractError(
        f"it was started {quantity(starts, 'time')} without ever ending, as if it killed its processes; it is not "
        "started again",
        Breach.POISON,
        key.tracking_id,
    )


# Ends the lease, unless another start has it by now.
_END = """
    UPDATE onceward_attempts SET ends = ends + 1, last_error = :error, last_at = {now},
        locked_until = CASE WHEN starts = :token THEN NULL ELSE locked_until END
    WHERE consumer_id = :consumer AND tracking_id = :tracking AND ends < starts
"""
