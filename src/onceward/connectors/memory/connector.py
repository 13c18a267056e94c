"""A queue in this process's memory, for tests and for work that may be lost with the process.

It stores bytes, leases and counts deliveries as a broker does, so code that works here works on a real wire.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from heapq import heapify, heappop, heappush
from threading import RLock
from typing import ParamSpec, TypeVar, Unpack

from onceward._process.bell import AsyncEar, Bell
from onceward._time import uptime
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.lease_rules import (
    BurialReason,
    DeadMessage,
    LeaseRules,
    LeaseSettings,
    read_dead_message,
)
from onceward.connectors.leased_deliveries import Held
from onceward.connectors.leases import (
    AsyncLeasingConnector,
    AvailableRow,
    LeasingConnector,
    seconds_until_due,
)
from onceward.connectors.memory.lines import MemoryLines
from onceward.task.exceptions import ExceptionCategory
from onceward.transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")

READY = 0.0
"""The `visible_at` of a ready row."""


class MemoryConnector(LeasingConnector):
    """A `Connector` without a wire. Threads may share it; other processes do not see it.

    `LeaseRules` explains the settings. A `clock` returns the time in seconds, by which leases and delays are then
    measured; tests pass their own.
    """

    def __init__(
        self, *, clock: Callable[[], float] | None = None, **settings: Unpack[LeaseSettings]
    ) -> None:
        self._rows = MemoryLeaseStore()
        super().__init__(self._rows, LeaseRules(**settings), clock)
        self.await_transactions = None if clock else self._await
        """See `onceward.connectors.base`. How long a test's clock takes is not known, so nothing can wait for it."""

    def seconds_until_due(self) -> float:
        """How long until a message is available, if none arrives."""
        return seconds_until_due(self._rows, self._now)

    def _await(self, seconds: float, /) -> bool:
        with self._rows.bell.heard() as ear:
            due = self.seconds_until_due()
            return due <= 0 or ear.wait(min(due, seconds)) or due <= seconds

    def heard_async(self) -> AbstractContextManager[AsyncEar]:
        """Listen to what is appended or given back, in a task."""
        return self._rows.bell.heard_async()


class AsyncMemoryConnector(AsyncLeasingConnector):
    """An `AsyncConnector` without a wire; settings as for `MemoryConnector`."""

    def __init__(
        self, *, clock: Callable[[], float] | None = None, **settings: Unpack[LeaseSettings]
    ) -> None:
        self._queue = MemoryConnector(clock=clock, **settings)
        super().__init__(self._queue)
        self.await_transactions_async = None if clock else self._await
        """As `MemoryConnector.await_transactions`."""

    async def _await(self, seconds: float, /) -> bool:
        with self._queue.heard_async() as ear:
            due = self._queue.seconds_until_due()
            return due <= 0 or await ear.wait(min(due, seconds)) or due <= seconds

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        # A real wire always yields to other tasks; a loop that relies on it must not hang here.
        await asyncio.sleep(0)
        return function(*args, **kwargs)


class _Message:
    __slots__ = (
        "body",
        "category",
        "deliveries",
        "enqueued_at",
        "error",
        "history",
        "key",
        "lost",
        "token",
        "visible_at",
    )

    def __init__(self, key: int, body: bytes, enqueued_at: float) -> None:
        self.key = key
        self.body = body
        self.enqueued_at = enqueued_at
        self.visible_at = READY
        self.deliveries = 0
        self.lost = 0
        self.token: int | None = None
        self.category: ExceptionCategory | None = None
        self.error: str | None = None
        self.history = ""

    def as_row(self) -> AvailableRow:
        lost = self.lost + (self.token is not None)
        return self.key, self.token, self.deliveries, lost, self.body


class MemoryLeaseStore(MemoryLines):
    """A `LeaseStore` in a dict, with two heaps over it.

    A heap entry is valid only while its message still has that `visible_at`: moving a message pushes a new
    entry and leaves the old one to be skipped.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._closed = False
        self._keys = itertools.count(1)
        self._messages: dict[int, _Message] = {}
        self._ready: list[int] = []
        self._waiting: list[tuple[float, int]] = []
        self._dead: list[DeadMessage] = []
        self.bell = Bell()
        """Rings when a message becomes ready, or gets a new time."""

    @contextmanager
    def transaction(self, wait: float) -> Iterator[None]:
        # All or none without a rollback: nothing inside can fail halfway.
        with self._lock:
            if self._closed:
                raise ConnectorClosedError("this memory connector is closed; create a new one to continue")
            yield

    def now(self) -> float:
        return uptime()

    def append(self, bodies: Sequence[bytes], now: float) -> None:
        self.put(zip(self._keys, bodies, strict=False), now)

    def put(self, keyed: Iterable[tuple[int, bytes]], now: float) -> None:
        """Append bodies under these keys, each larger than all before."""
        messages = {key: _Message(key, body, now) for key, body in keyed}
        self._ready.extend(messages)  # larger than all keys before: still a heap
        self._messages.update(messages)
        if self._in_lines:
            self._unlined.extend(messages)
        self.bell.ring()

    def due(self) -> float | None:
        while self._ready and not self._is_current(self._ready[0], READY):
            heappop(self._ready)
        if self._ready:
            return READY
        while self._waiting and not self._is_current(self._waiting[0][1], self._waiting[0][0]):
            heappop(self._waiting)
        return self._waiting[0][0] if self._waiting else None

    def available(self, now: float, limit: int) -> list[AvailableRow]:
        taken: dict[int, _Message] = {}
        try:
            while self._waiting and self._waiting[0][0] <= now and len(taken) < limit:
                visible_at, key = heappop(self._waiting)
                self._take(key, visible_at, taken)
            while self._ready and len(taken) < limit:
                self._take(heappop(self._ready), READY, taken)
        finally:
            for message in taken.values():  # they were only inspected
                self._push(message.key, message.visible_at)
        return [message.as_row() for message in taken.values()]

    def lease(self, rows: Sequence[AvailableRow], token: int, until: float) -> None:
        for key, _, deliveries, lost, _ in rows:
            message = self._messages[key]
            message.token = token
            message.deliveries = deliveries + 1
            message.lost = lost
            self._move(message, until)

    def extend(self, deliveries: Sequence[Held], until: float) -> list[Held]:
        missed = []
        for held in deliveries:
            if (message := self._find(*held)) is None:
                missed.append(held)
            else:
                self._move(message, until)
        return missed

    def remove(self, deliveries: Sequence[Held], transactions: Sequence[Transaction]) -> list[Held]:
        missed = []
        for held in deliveries:
            if self._find(*held) is None:
                missed.append(held)
            else:
                del self._messages[held[0]]
        self._left()
        return missed

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        if (message := self._find(key, token)) is None:
            return False
        message.token = None
        message.deliveries -= 1
        self._move(message, visible_at)
        return True

    def hasten(self, key: int) -> None:
        message = self._messages.get(key)
        if message is not None and message.token is None:
            self._move(message, READY)

    def delay(
        self,
        key: int,
        token: int,
        until: float,
        category: ExceptionCategory | None,
        error: str | None,
        history: str,
    ) -> bool:
        if (message := self._find(key, token)) is None:
            return False
        message.token = None
        message.category = category
        message.error = error
        message.history += history
        self._move(message, until)
        return True

    def bury(
        self,
        key: int,
        token: int | None,
        now: float,
        reason: BurialReason,
        transaction_id: str | None,
        category: ExceptionCategory | None = None,
        error: str | None = None,
        history: str = "",
    ) -> bool:
        if (message := self._find(key, token)) is None:
            return False
        dead = read_dead_message(
            (key, now),
            transaction_id,
            message.body,
            reason,
            message.category if category is None else category,
            message.error if error is None else error,
            message.deliveries,
            message.enqueued_at,
            now,
            message.history + history,
        )
        del self._messages[key]
        self._dead.append(dead)
        self._left()
        return True

    def counts(self, now: float) -> dict[str, int]:
        counts = {"ready": 0, "leased": 0, "delayed": 0, "dead": len(self._dead)}
        for message in self._messages.values():
            if message.visible_at <= now:
                counts["ready"] += 1
            else:
                counts["delayed" if message.token is None else "leased"] += 1
        return counts

    def dead(self, limit: int) -> list[DeadMessage]:
        return self._dead[:limit]

    def forget_dead(self, keys: Sequence[tuple[int, float]]) -> None:
        forgotten = set(keys)
        self._dead = [dead for dead in self._dead if dead.key not in forgotten]
        self._left()

    acknowledge_dead = forget_dead

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _find(self, key: int, token: int | None) -> _Message | None:
        message = self._messages.get(key)
        return message if message is not None and message.token == token else None

    def _is_current(self, key: int, visible_at: float) -> bool:
        message = self._messages.get(key)
        return message is not None and message.visible_at == visible_at

    def _take(self, key: int, visible_at: float, taken: dict[int, _Message]) -> None:
        if self._is_current(key, visible_at) and (not self._in_lines or key in self._lined_up):
            taken[key] = self._messages[key]

    def _move(self, message: _Message, visible_at: float) -> None:
        self._push(message.key, visible_at)  # first, so an interrupt cannot leave it without an entry
        message.visible_at = visible_at
        if message.token is None:
            self.bell.ring()

    def _push(self, key: int, visible_at: float) -> None:
        if visible_at == READY:
            heappush(self._ready, key)
            return
        if len(self._waiting) > 2 * len(self._messages) + 1000:  # mostly entries of settled messages
            waiting = [(m.visible_at, m.key) for m in self._messages.values() if m.visible_at != READY]
            heapify(waiting)
            self._waiting = waiting
        heappush(self._waiting, (visible_at, key))
