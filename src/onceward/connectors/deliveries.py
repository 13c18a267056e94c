"""Which delivery a transaction object belongs to."""

from __future__ import annotations

import weakref
from typing import Any

from onceward.transaction import Transaction

Held = tuple[Any, int]
"""Identifies a delivery in the store: the key of its row or entry, and the token of this delivery."""


class LeasedDelivery(weakref.ref[Transaction]):
    """One delivery: the object that a fetch returned, and what identifies it in the store."""

    __slots__ = ("deliveries", "held", "identity", "settled", "since")

    identity: int
    held: Held
    deliveries: int
    settled: bool
    since: float
    """When its lease began at the earliest, if the connector tracks that."""


class LeasedDeliveries:
    """Deliveries by the identity of the returned object: one transaction id may be queued twice.

    Keeps nothing alive. Once the last reference to a transaction is gone, nothing can settle it, so its delivery
    is forgotten here; in the store its lease expires. A settled one is remembered until then, so settling it
    twice is harmless.
    """

    def __init__(self) -> None:
        by_identity: dict[int, LeasedDelivery] = {}
        self._by_identity = by_identity

        def forget(gone: Any) -> None:
            # Runs before the memory, and with it the identity, can be reused.
            by_identity.pop(gone.identity, None)

        self._forget = forget

    def __len__(self) -> int:
        return len(self._by_identity)

    def record(self, transaction: Transaction, held: Held, deliveries: int, since: float = 0.0) -> None:
        delivery = LeasedDelivery(transaction, self._forget)
        delivery.identity = id(transaction)
        delivery.held = held
        delivery.deliveries = deliveries
        delivery.settled = False
        delivery.since = since
        self._by_identity[delivery.identity] = delivery

    def find(self, transaction: Transaction) -> LeasedDelivery | None:
        return self._by_identity.get(id(transaction))

    def of(self, transaction: Transaction) -> LeasedDelivery:
        """Like `find`, but raises `ValueError` for a transaction that was not fetched here."""
        delivery = self._by_identity.get(id(transaction))
        if delivery is None:
            name = getattr(transaction, "id", type(transaction).__name__)
            raise ValueError(
                f"transaction {name!r} was not fetched from this connector; "
                "settle or extend the objects that its fetch returned, not copies of them"
            )
        return delivery
