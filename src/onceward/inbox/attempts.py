"""Starts are recorded before the handler runs: a start without an end is a crash, and too many make the event poison.

A start has a lease, so a copy that arrives while the event is in flight gets `Busy` and is not counted. The starts of a
fetched batch are recorded in one transaction. An event whose earlier start has no end is a *suspect*: its start is
recorded only when it is about to run, alone, so a crash does not count against its neighbors or take them with it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from onceward._text import driver_message
from onceward.db.transaction import DbTransaction, regardless
from onceward.inbox.contract import Contract
from onceward.inbox.errors import AT_ONCE, Breach, Busy, ContractError
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


class Start(NamedTuple):
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
        """Record a start for each key, in one transaction. Keys missing from the result must be started separately."""

        def expect(transaction: DbTransaction) -> list[tuple[str, int]]:
            # Sorted: workers with copies of the same events wait for each other without a deadlock.
            distinct = sorted(dict(zip(map(attrgetter("tracking_id"), keys), keys, strict=True)).values())
            if not distinct:
                return []
            return self._store.record_starts(transaction, contract.consumer_id, distinct, contract.lease)

        if not keys and not self._finished and not self._unwritten:
            return {}
        starts: dict[str, Start] = {}
        for tracking_id, number in await self._with_leftovers(expect):
            self._open.add((contract.consumer_id, tracking_id))
            starts[tracking_id] = Start(number)
        return starts

    async def start(self, contract: Contract, key: Key, alone: bool = False) -> Start | None:
        """Record one start. Returns None, and records nothing, if an earlier start has no end: it has to run alone.

        Raises `Busy` if the event is in flight elsewhere, and `ContractError` if it is poison.
        """

        def start(transaction: DbTransaction) -> Start | Exception | None:
            at_most = contract.poison_after if alone else 1
            attempts = self._store.start(transaction, key, at_most, contract.lease)
            if attempts is not None:
                self._open.add((key.consumer_id, key.tracking_id))
                return Start(attempts.starts)
            found = self._store.attempts(transaction, key)
            if self._store.look_up(transaction, key).digest is not None:
                return Start(found.starts)
            if not found.locked and found.unended >= contract.poison_after:
                return poisoned(key, found.unended)
            return in_flight(found, contract.lease) if found.locked or alone else None

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
                self._store.extend_attempts, contract.consumer_id, ours, contract.lease
            )

    def finish(self, key: Key) -> None:
        self._finished.append(key)
        self.release(key)

    def release(self, key: Key) -> None:
        """Forget a start that has an end, or whose lease the heartbeat keeps."""
        self._open.discard((key.consumer_id, key.tracking_id))

    async def _with_leftovers(self, operation: Callable[[DbTransaction], Any] | None) -> Any:
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
            if self._store.limit_waiting:
                self._store.run(transaction, self._store.limit_waiting)
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
            return await self._ports.transact(write)
        except BaseException:
            self._unwritten.extendleft(reversed(ends))
            self._finished.extendleft(reversed(finished))
            raise


class Gate:
    """Lets events run together, and a suspect alone: it waits until no event is inside, and others wait for its end."""

    def __init__(self) -> None:
        self.inside = 0
        self.alone = False
        self.waiting = 0
        """How many wait to be alone."""

    def may_enter(self, alone: bool) -> bool:
        if self.alone:
            return False
        return self.inside == 0 if alone else self.waiting == 0

    def let_in(self, alone: bool) -> None:
        self.inside += 1
        self.alone = alone


class BlockingGate(Gate):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    async def enter(self, alone: bool) -> bool:
        """Wait for permission to run. Returns False if it took longer than `PATIENCE`."""
        with self._lock:
            if not (alone or self.alone or self.waiting):
                self.inside += 1  # the common case
                return True
            if self.may_enter(alone):
                self.let_in(alone)
                return True
        with on_cancel(self._wake):
            return self._wait(alone)

    def _wait(self, alone: bool) -> bool:
        with self._lock:
            self.waiting += alone
            try:
                self._changed.wait_for(lambda: self.may_enter(alone) or cancel_requested(), PATIENCE)
                raise_if_cancelled()
                if not self.may_enter(alone):
                    return False
                self.let_in(alone)
                return True
            finally:
                self.waiting -= alone
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def leave(self) -> None:
        with self._lock:
            self.inside -= 1
            self.alone = False
            if self.waiting or self.inside == 0:
                self._changed.notify_all()


class AsyncGate(Gate):
    def __init__(self) -> None:
        super().__init__()
        self._sleepers: deque[asyncio.Future[None]] = deque()

    async def enter(self, alone: bool) -> bool:
        if self.may_enter(alone):
            self.let_in(alone)
            return True
        self.waiting += alone
        until = monotonic() + PATIENCE
        try:
            while not self.may_enter(alone):
                changed = asyncio.get_running_loop().create_future()
                self._sleepers.append(changed)
                try:
                    await asyncio.wait_for(changed, until - monotonic())
                except TimeoutError:
                    return False
            self.let_in(alone)
            return True
        finally:
            self.waiting -= alone
            self._wake()

    def leave(self) -> None:
        self.inside -= 1
        self.alone = False
        self._wake()

    def _wake(self) -> None:
        while self._sleepers:
            changed = self._sleepers.popleft()
            if not changed.done():
                changed.set_result(None)


def in_flight(found: Attempts, lease: float) -> Busy:
    """Return `Busy` with a delay that grows with the time since the lease was last extended."""
    silent = max(lease - found.locked_for, 0.0) if found.locked else 0.0
    wait = max(AT_ONCE.delay(), min(silent / 4, found.locked_for, LONGEST_WAIT))
    left = f"; its lease expires in {found.locked_for:.0f} s" if found.locked_for >= 1 else ""
    return Busy(f"another copy of it is in flight, or was when its process died{left}", delay=wait)


def poisoned(key: Key, starts: int) -> ContractError:
    return ContractError(
        f"it was started {starts} times without ever ending, as if it killed its processes; it is not started again",
        Breach.POISON,
        key.tracking_id,
    )


# Ends the lease, unless another start has it by now.
_END = """
    UPDATE onceward_attempts SET ends = ends + 1, last_error = :error, last_at = {now},
        locked_until = CASE WHEN starts = :token THEN NULL ELSE locked_until END
    WHERE consumer_id = :consumer AND tracking_id = :tracking AND ends < starts
"""
