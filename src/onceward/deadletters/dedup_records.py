"""Whether the event of a message is done: then a dead letter of it would be wrong.

The answer and what follows from it are one transaction. A worker that does the event at the same time holds the lock of
the event until its commit, which also resolves a letter that was there first (`Store.admit`).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from onceward.connectors.codec import DecodeError
from onceward.db.transaction import DbTransaction
from onceward.deadletters.letter import Category, transaction_of
from onceward.inbox.errors import ContractError
from onceward.inbox.event import Digest, Event
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Key
from onceward.transaction import Transaction


class Standing(Enum):
    """Of an event, at its inbox."""

    NOT_DONE = auto()
    DONE = auto()
    IN_FLIGHT = auto()
    """A transaction that does it is open: it may commit or not."""


class BuriedEvent(NamedTuple):
    """The event in a message, by which the inbox knows it."""

    key: Key
    digest: Digest


def event_in(
    consumer: str, body: bytes, *, message_id: str, event_at: float | None, first_failed_at: float
) -> BuriedEvent | None:
    """Return the event that a redrive of this message would deliver; None if it is none."""
    try:
        redriven = transaction_of(
            body, message_id=message_id, event_at=event_at, first_failed_at=first_failed_at
        )
    except DecodeError:
        return None
    return event_of(consumer, redriven)


def event_of(consumer: str, transaction: Transaction) -> BuriedEvent | None:
    try:
        event = Event.of(transaction)
        return BuriedEvent(Key(consumer, event.tracking_id, event.day), event.digest)
    except ContractError:
        return None


def standing(transaction: DbTransaction, store: Store, event: BuriedEvent | None) -> Standing:
    """Keep the event from being done until the transaction ends, and return whether it was done before.

    The same id with another payload or event type is another message: it is not done.
    """
    if event is None:
        return Standing.NOT_DONE
    key, digest = event
    if not store.lock(transaction, f"{key.consumer_id}:{key.tracking_id}"):
        return Standing.IN_FLIGHT
    return Standing.DONE if store.look_up(transaction, key).digest in digest else Standing.NOT_DONE


def category_for(
    transaction: DbTransaction, store: Store, event: BuriedEvent | None, category: Category
) -> Category:
    """Return the category, or `IN_DOUBT` if the event has an effect in doubt whose key has expired."""
    if event is None or category is Category.POISON or not store.has_expired_doubt(transaction, event.key):
        return category
    return Category.IN_DOUBT
