"""Order within an aggregate, for consumers that need it. One aggregate never blocks another.

`latest-wins`: an event that arrives after a later one is skipped. `strict`: an event waits for its predecessors, and is
set aside if they do not arrive in time.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import msgspec

from onceward.db.transaction import DbTransaction
from onceward.inbox.contract import Contract
from onceward.inbox.errors import IN_A_MOMENT, Breach, Busy, ContractError, Parked
from onceward.inbox.event import Event
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Key
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

_log = OwnLogger(logging.getLogger("onceward.inbox"))

SHORTEST_WAIT, LONGEST_WAIT = 0.2, 5.0
"""Seconds until a parked event is retried: half the time it has waited so far, within these bounds."""
MOST = 10_000
"""Parked events that are remembered. Any others come back when their delay is over."""

Place = tuple[str | None, int | None]
"""An aggregate, and a number in it."""


class Turn(Enum):
    IN_TURN = auto()
    SUPERSEDED = auto()


class OutOfTurn(Exception):
    """The predecessors are missing. Rolls back the transaction; the event is then parked."""

    def __init__(self, expected: int) -> None:
        super().__init__(expected)
        self.expected = expected


def take_turn(transaction: DbTransaction, store: Store, contract: Contract, key: Key, event: Event) -> Turn:
    """Advance the aggregate to this event, in the transaction that also processes it."""
    aggregate_id, sequence = place_of(event)
    if not store.lock(transaction, f"{contract.consumer_id}:aggregate:{aggregate_id}"):
        raise Busy(f"another event of aggregate {aggregate_id} is in flight", delay=IN_A_MOMENT.delay())
    last = store.last_sequence(transaction, key, aggregate_id)
    if contract.sequencing == "strict":
        expected = contract.first_sequence if last is None else last + 1
        if sequence > expected:
            raise OutOfTurn(expected)
        if sequence < expected:
            raise ContractError(
                f"aggregate {aggregate_id} is past number {sequence}: {expected} is next. Another event had this "
                "number, or it is below the contract's first_sequence",
                Breach.ENVELOPE,
                key.tracking_id,
            )
    elif last is not None and sequence <= last:
        store.mark_superseded(transaction, key)
        return Turn.SUPERSEDED
    store.advance(transaction, key, aggregate_id, sequence)
    return Turn.IN_TURN


def park(
    transaction: DbTransaction, store: Store, contract: Contract, key: Key, event: Event, expected: int
) -> Exception:
    """Record that the event waits, and return the exception to raise once that is committed."""
    aggregate_id, sequence = place_of(event)
    waited = store.park(transaction, key, aggregate_id, sequence)
    missing = f"number {expected} of aggregate {aggregate_id} has not arrived; this is {sequence}"
    if waited < contract.gap_timeout:
        return Parked(missing, delay=min(max(waited / 2, SHORTEST_WAIT), LONGEST_WAIT))
    store.unpark(transaction, key, aggregate_id)
    return ContractError(f"{missing}, and it has waited for {waited:.0f} s", Breach.GAP, key.tracking_id)


def place_of(event: Event) -> tuple[str, int]:
    if event.aggregate_id is None or event.sequence is None:
        missing = "aggregate_id" if event.aggregate_id is None else "sequence"
        raise ContractError(
            f"it has no {missing}, which the contract's sequencing needs",
            Breach.ENVELOPE,
            event.tracking_id,
        )
    return event.aggregate_id, event.sequence


class _Waiting:
    __slots__ = ("delivered", "is_back")

    def __init__(self, delivered: Transaction) -> None:
        self.delivered = delivered
        self.is_back = False
        """Whether its source has it."""


class ParkedEvents:
    """Those of one call. One whose predecessor the call has done need not wait for its time."""

    def __init__(self) -> None:
        self._waiting: dict[Place, _Waiting] = {}
        self._in_turn: dict[int, _Waiting] = {}
        """Those whose predecessor is done, by the identity of what was delivered."""
        self._hasten: Callable[[Sequence[Transaction]], Awaitable[Any]] | None = None

    def use(self, hasten: Callable[[Sequence[Transaction]], Awaitable[Any]]) -> None:
        """`hasten` makes transactions available that their source has for later."""
        self._hasten = hasten

    def park(self, event: Event, delivered: Transaction) -> None:
        place = event.aggregate_id, event.sequence
        self._waiting.pop(place, None)
        self._waiting[place] = _Waiting(delivered)
        if len(self._waiting) > MOST:
            with suppress(KeyError, RuntimeError, StopIteration):  # other threads park, too
                del self._waiting[next(iter(self._waiting))]

    def done(self, event: Event) -> None:
        """It is the turn of the next one."""
        if self._waiting and event.sequence is not None:
            successor = self._waiting.pop((event.aggregate_id, event.sequence + 1), None)
            if successor is not None:
                self._in_turn[id(successor.delivered)] = successor

    def hastened(self, settlements: Sequence[Settlement]) -> Sequence[Settlement]:
        """Return these, without the delay of events that are in turn."""
        if not self._waiting and not self._in_turn:
            return settlements
        back = {id(each.delivered): each for each in list(self._waiting.values())}
        hastened = []
        for each in settlements:
            identity = id(each.transaction)
            if each.verdict is Verdict.RETURNED and self._in_turn.pop(identity, None) is not None:
                hastened.append(msgspec.structs.replace(each, delay=0.0))
                continue
            if identity in back:
                back[identity].is_back = True
            hastened.append(each)
        return hastened

    async def call_up(self) -> None:
        """Have the source deliver those in turn that it has."""
        waiting = [each.delivered for each in list(self._in_turn.values()) if each.is_back]
        for each in waiting:
            self._in_turn.pop(id(each), None)
        if waiting and self._hasten is not None:
            try:
                await self._hasten(waiting)
            except Exception as error:  # noqa: BLE001  they come when their delay is over
                _log.info("parked events could not be called up early: %s", error)
