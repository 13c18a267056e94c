"""Starts are written down before the handler runs: a start without an end is a crash, and too many are poison.

A start has a lease, so that a copy that arrives while the event is in hand is told busy and is not counted. Starts of
a fetched batch are written in one transaction. One whose earlier start has no end is a *suspect*: its start is written
only when it is about to run, alone, so that it cannot take its neighbours' counts up with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple, TypeVar

from onceward._text import driver_message
from onceward.db.transaction import DbTransaction
from onceward.inbox.contract import Contract
from onceward.inbox.errors import AT_ONCE, Breach, Busy, ContractError
from onceward.inbox.ports import InboxPorts
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Attempts, Key

_log = logging.getLogger("onceward.inbox")

T = TypeVar("T")

LONGEST_WAIT = 5.0
"""Seconds until a copy asks again whether the event is still in hand."""


class Start(NamedTuple):
    token: int
    """The number of this start: no other start of the event has it."""


class End(NamedTuple):
    key: Key
    token: int
    error: str | None


class AttemptLedger:
    """What one inbox writes down of its attempts."""

    def __init__(self, store: Store, ports: InboxPorts) -> None:
        self._store = store
        self._ports = ports
        self._finished: deque[Key] = deque()
        """Done, and of no interest any more: taken off the ledger with the next start."""
        self._unwritten: deque[End] = deque()
        """Ends that the database did not take: written with the next start."""
        self._open: set[tuple[str, str]] = set()
        """Consumer and tracking id of the starts of this inbox that have no end yet: only their leases are ours."""

    async def expect(self, contract: Contract, keys: Sequence[Key]) -> dict[str, Start]:
        """Write down a start of each, in one transaction. Those that are missing in the answer need their own."""

        def expect(transaction: DbTransaction) -> list[tuple[str, int]]:
            # In order: who has copies of the same events waits for the other, and not both in a circle.
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
        """Write down one start. None, and nothing is written: an earlier one has no end, so it has to be alone.

        Raises Busy if it is in hand elsewhere, and ContractError if it is poison.
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
            return in_hand(found, contract.lease) if found.locked or alone else None

        begun = await self._with_leftovers(start)
        if isinstance(begun, Exception):
            raise begun
        return begun

    async def end(self, key: Key, token: int, error: str | None) -> None:
        await self.end_all([End(key, token, error)])

    async def end_all(self, ends: Sequence[End]) -> None:
        """Write down that these have ended, without success. What cannot be written now is written later."""
        if not ends:
            return
        self._unwritten.extend(ends)
        for end in ends:
            self.released(end.key)
        try:
            await self._with_leftovers(lambda _: None)
        except Exception as error:  # noqa: BLE001  the failure that is being written down says more
            _log.warning(
                "the ends of %d attempts are not written down yet: %s", len(ends), driver_message(error)
            )

    async def extend(self, contract: Contract, tracking_ids: Sequence[str]) -> None:
        """Keep the leases of our starts. Those of others run out even while a copy of the event waits here: they may
        be dead."""
        ours = [each for each in tracking_ids if (contract.consumer_id, each) in self._open]
        if ours:
            await self._ports.transact(
                self._store.extend_attempts, contract.consumer_id, ours, contract.lease
            )

    def finished(self, key: Key) -> None:
        self._finished.append(key)
        self.released(key)

    def released(self, key: Key) -> None:
        """Its start has an end, or is kept by somebody else."""
        self._open.discard((key.consumer_id, key.tracking_id))

    async def _with_leftovers(self, operation: Callable[[DbTransaction], T]) -> T:
        """The operation, in one transaction with what is still to be written down. That stays so until it commits."""
        ends: list[End] = []
        finished: list[Key] = []
        with suppress(IndexError):  # others may add and take meanwhile
            while True:
                ends.append(self._unwritten.popleft())
        with suppress(IndexError):
            while True:
                finished.append(self._finished.popleft())

        def write(transaction: DbTransaction) -> T:
            self._store.limit_waiting(transaction)
            for end in ends:
                self._store.end(transaction, end.key, end.token, end.error)
            by_consumer: dict[str, list[str]] = {}
            for key in finished:
                by_consumer.setdefault(key.consumer_id, []).append(key.tracking_id)
            for consumer_id, tracking_ids in by_consumer.items():
                self._store.forget_attempts(transaction, consumer_id, tracking_ids)
            return operation(transaction)

        try:
            return await self._ports.transact(write)
        except BaseException:
            self._unwritten.extendleft(reversed(ends))
            self._finished.extendleft(reversed(finished))
            raise


def in_hand(found: Attempts, lease: float) -> Busy:
    """Who has it keeps its lease, again and again. The longer nobody did, the less often it is worth asking."""
    silent = max(lease - found.locked_for, 0.0) if found.locked else 0.0
    wait = max(AT_ONCE.delay(), min(silent / 4, found.locked_for, LONGEST_WAIT))
    left = f"; its lease runs for {found.locked_for:.0f} s" if found.locked_for >= 1 else ""
    return Busy(f"another copy of it is in hand, or was when its process died{left}", delay=wait)


def poisoned(key: Key, starts: int) -> ContractError:
    return ContractError(
        f"it was started {starts} times without ever coming to an end, as if it killed its processes; it is not "
        "started again",
        Breach.POISON,
        key.tracking_id,
    )
