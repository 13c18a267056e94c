"""Which delivery a transaction object belongs to."""

from __future__ import annotations

import weakref
from typing import Any

from onceward.transaction import Transaction

Held = tuple[Any, int]
"""How the store knows a delivery: the key of its row or entry, and the token of this delivery."""


class Handout(weakref.ref[Transaction]):
    """One delivery: the object that was handed out, and how the store knows it."""

    __slots__ = ("deliveries", "held", "identity", "settled", "since")

    identity: int
    held: Held
    deliveries: int
    settled: bool
    since: float
    """From when on it is certainly ours for a lease, where the connector keeps count of that."""


class Handouts:
    """Deliveries by the identity of the very object handed out: one id may be queued twice.

    Nothing is kept alive. When the last reference to a transaction goes, nobody can settle it any more, and
    its delivery is forgotten here; in the store its lease runs out. A settled one is known until then, so
    that settling it twice is harmless.
    """

    def __init__(self) -> None:
        by_identity: dict[int, Handout] = {}
        self._by_identity = by_identity

        def forget(gone: Any) -> None:
            # Runs before the memory, and with it the identity, can be used again.
            by_identity.pop(gone.identity, None)

        self._forget = forget

    def __len__(self) -> int:
        return len(self._by_identity)

    def record(self, transaction: Transaction, held: Held, deliveries: int, since: float = 0.0) -> None:
        handout = Handout(transaction, self._forget)
        handout.identity = id(transaction)
        handout.held = held
        handout.deliveries = deliveries
        handout.settled = False
        handout.since = since
        self._by_identity[handout.identity] = handout

    def of(self, transaction: Transaction) -> Handout:
        handout = self._by_identity.get(id(transaction))
        if handout is None:
            name = getattr(transaction, "id", type(transaction).__name__)
            raise ValueError(
                f"transaction {name!r} was not fetched from this connector; "
                "only the very objects that its fetch returned can be settled or extended, not copies of them"
            )
        return handout
