"""Deliveries that a connector has under a lease, found by the transaction that was delivered."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from onceward.connectors.lease_rules import Bury, LeaseRules, Redeliver
from onceward.task.exceptions import failure_category
from onceward.transaction import Settlement, Transaction

Held = tuple[Any, int]
"""Identifies a delivery in the store: the key of its row or entry, and the token of this delivery."""


class LeasedDelivery(weakref.ref[Transaction]):
    """One delivery: the object that a fetch returned, and what identifies it in the store."""

    __slots__ = ("deliveries", "held", "identity", "leaving", "lost", "next", "settled", "since")

    identity: int
    held: Held
    deliveries: int
    lost: int
    """How many of its deliveries were never settled."""
    settled: bool
    leaving: bool
    """Whether the transaction of its handler has removed it, and may not have committed yet."""
    since: float
    """When its lease began at the earliest, if the connector tracks that."""
    next: str
    """What becomes of its message, for the log, once it has failed."""


class LeasedDeliveries(dict[int, LeasedDelivery]):
    """Deliveries by the identity of the returned object: one transaction id may be queued twice.

    Keeps nothing alive. Once the last reference to a transaction is gone, nothing can settle it, so its delivery
    is forgotten here; in the store its lease expires. A settled one is remembered until then, so settling it
    twice is harmless.
    """

    def record(
        self, transaction: Transaction, held: Held, deliveries: int, since: float = 0.0, lost: int = 0
    ) -> None:
        delivery = LeasedDelivery(transaction, self._forget)
        delivery.identity = id(transaction)
        delivery.held = held
        delivery.deliveries = deliveries
        delivery.lost = lost
        delivery.settled = delivery.leaving = False
        delivery.since = since
        self[delivery.identity] = delivery

    def record_first(self, transactions: Sequence[Transaction], keys: Sequence[Any], since: float) -> None:
        """`record` the first deliveries of these, whose token is that it is the first."""
        forget = self._forget
        for transaction, key in zip(transactions, keys, strict=True):
            delivery = LeasedDelivery(transaction, forget)
            delivery.identity = identity = id(transaction)
            delivery.held = key, 1
            delivery.deliveries = 1
            delivery.lost = 0
            delivery.settled = delivery.leaving = False
            delivery.since = since
            self[identity] = delivery

    def _forget(self, gone: Any) -> None:
        # Runs before the memory, and with it the identity, can be reused.
        self.pop(gone.identity, None)

    def of(self, transaction: Transaction) -> LeasedDelivery:
        """Raises `ValueError` for a transaction that was not fetched here."""
        delivery = self.get(id(transaction))
        if delivery is None:
            name = getattr(transaction, "id", type(transaction).__name__)
            raise ValueError(
                f"transaction {name!r} was not fetched from this connector; "
                "settle or extend the objects that its fetch returned, not copies of them"
            )
        return delivery


class Leasing:
    """What every connector with leases knows of its deliveries."""

    rules: LeaseRules
    _deliveries: LeasedDeliveries

    def fetched_here(self, transactions: Sequence[Transaction], /) -> list[Transaction]:
        """Those of these that this connector has delivered."""
        return [each for each in transactions if id(each) in self._deliveries]

    def is_suspect(self, transaction: Transaction, /) -> bool:
        """See `onceward.connectors.base`. One that was not fetched here is not."""
        delivery = self._deliveries.get(id(transaction))
        return delivery is not None and self.rules.counts_lost and delivery.lost >= self.rules.suspect_after


def decide(rules: LeaseRules, settlement: Settlement, delivery: LeasedDelivery) -> Redeliver | Bury:
    """Decide what becomes of a message whose delivery has failed, and have the delivery say it."""
    error = settlement.error
    decision = rules.after_failure(
        None if error is None else failure_category(error),
        delivery.deliveries,
        delivery.lost,
        None if error is None else error.redelivery,
    )
    delivery.next = rules.describe(decision, delivery.deliveries)
    return decision
