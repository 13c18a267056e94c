"""Entries that are delivered for the first time and done in time: what nearly all of them are.

A batch of such entries is handled as a whole, with few calls per entry. As soon as one of them is different, the whole
batch goes the general way, in `protocol`, which is why this raises nothing and writes nothing before it is sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from onceward.connectors.codec import DecodeError, decode_all
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.leased_deliveries import LeasedDeliveries, LeasedDelivery
from onceward.transaction import Settlement, Transaction, Verdict

CERTAIN: Final = 0.9
"""The fraction of a lease in which a delivery is certainly still ours, by our own clock."""
DONE: Final = Verdict.DONE


class FirstDeliveries:
    """The part of a `StreamQueue` that delivers new entries and ends them."""

    rules: LeaseRules
    _deliveries: LeasedDeliveries

    def _deliver_new(self, entries: Sequence[tuple[bytes, Any]], asked: float) -> list[Transaction] | None:
        """Deliver what XREADGROUP has returned; None if `decode_new` does."""
        transactions = decode_new(entries)
        if transactions is not None:
            self._deliveries.record_first(transactions, [entry for entry, _ in entries], asked)
        return transactions

    def _deliver_decoded(
        self, rows: Sequence[tuple[Any, int, Any, int]], asked: float
    ) -> list[Transaction] | None:
        """Deliver these, if all of them are first deliveries, and decoded already because their keys were needed."""
        for _, deliveries, content, _ in rows:
            if deliveries != 1 or type(content) is not Transaction:
                return None
        transactions = [row[2] for row in rows]
        self._deliveries.record_first(transactions, [row[0] for row in rows], asked)
        return transactions

    def _surely_done(
        self, settlements: Sequence[Settlement], now: float
    ) -> dict[bytes, LeasedDelivery] | None:
        """These deliveries by their entries, if all of them are first ones that are done, and none can have lost its
        lease: no other consumer can own such an entry, and it has no history to clear. None if one is not."""
        since, get = now - self.rules.lease * CERTAIN, self._deliveries.get
        done: dict[bytes, LeasedDelivery] = {}
        for each in settlements:
            delivery = get(id(each.transaction))
            if (
                delivery is None
                or each.verdict is not DONE
                or delivery.deliveries != 1
                or delivery.settled
                or delivery.since <= since
            ):
                return None
            done[delivery.held[0]] = delivery
        return done


def decode_new(entries: Sequence[tuple[bytes, Any]]) -> list[Transaction] | None:
    """Decode these entries; None if one of them has unusual fields, or cannot be decoded."""
    for _, fields in entries:
        if fields is None or len(fields) != 4 or fields[2] != b"body":
            return None
    try:
        return decode_all([fields[3] for _, fields in entries])
    except DecodeError:
        return None
