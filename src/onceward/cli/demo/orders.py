"""The orders of a demo, and what is going to happen to each. The same seed makes the same orders."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import msgspec

from onceward.transaction import Transaction

ACCOUNTS = 40


class Fate(StrEnum):
    """What is going to happen to an order."""

    PLAIN = "plain"
    TWICE = "twice"
    """It is sent twice, under the same id, as by an impatient client."""
    REFUSED = "refused"
    """Its card has expired. No retry will help."""
    FLAKY = "flaky"
    """The card service fails, and then does not."""
    HANGING = "hanging"
    """The card service does not answer the first time."""
    POISON = "poison"
    """The card service fails whenever it is asked."""


SHARES = {Fate.TWICE: 0.05, Fate.REFUSED: 0.04, Fate.FLAKY: 0.08, Fate.HANGING: 0.01, Fate.POISON: 0.001}
"""Of all orders; at least one of each. The others are plain."""


class Order(msgspec.Struct, frozen=True):
    id: str
    account: str
    cents: int
    fate: Fate

    @classmethod
    def of(cls, transaction: Transaction) -> Order:
        """The order that a transaction carries."""
        return cls(transaction.id, **{**transaction.payload, "fate": Fate(transaction.payload["fate"])})


def make_orders(number: int, seed: int) -> list[Order]:
    """So many different orders."""
    random = Random(seed)
    fates = [fate for fate, share in SHARES.items() for _ in range(max(1, round(number * share)))]
    fates += [Fate.PLAIN] * (number - len(fates))
    random.shuffle(fates)
    return [
        Order(
            f"order-{position:06}",
            f"account-{random.randrange(ACCOUNTS):02}",
            random.randrange(100, 20_000),
            fate,
        )
        for position, fate in enumerate(fates, start=1)
    ]


def make_messages(orders: Sequence[Order], seed: int) -> list[Transaction]:
    """The orders as they are sent: those that are sent twice come again, anywhere later.

    Copies of an order share its id. Their number, in the metadata, tells a copy from a redelivery; only the
    demo's figures need that.
    """
    random = Random(seed)
    places = [(float(place), order) for place, order in enumerate(orders)]
    places += [
        (random.uniform(place, len(orders)), order) for place, order in places if order.fate is Fate.TWICE
    ]
    places.sort(key=lambda placed: placed[0])
    return [
        Transaction(
            id=order.id,
            payload={"account": order.account, "cents": order.cents, "fate": str(order.fate)},
            metadata={"message": number},
            source="demo",
        )
        for number, (_, order) in enumerate(places)
    ]


def message_number(transaction: Transaction) -> int:
    number: int = transaction.metadata["message"]
    return number
