"""Order within an aggregate, for consumers that need it. One aggregate never blocks another.

`latest-wins`: an event that arrives after a later one is skipped. `strict`: an event waits for its predecessors, and is
set aside if they do not arrive in time.
"""

from __future__ import annotations

from enum import Enum, auto

from onceward.db.transaction import DbTransaction
from onceward.inbox.contract import Contract
from onceward.inbox.errors import IN_A_MOMENT, Breach, Busy, ContractError, Parked
from onceward.inbox.event import Event
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Key

SHORTEST_WAIT, LONGEST_WAIT = 0.2, 5.0
"""Seconds until a parked event is retried: half the time it has waited so far, within these bounds."""


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
