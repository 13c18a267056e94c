"""The orders of a demo, and what will happen to each. The same seed makes the same orders."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import msgspec

from onceward import Transaction

ARTICLES = tuple(f"article-{number:02}" for number in range(1, 41))
"""Articles that the warehouse lists from the start."""
NEW_ARTICLE = "article-new"
"""An article that the shop already sells and the warehouse does not list yet."""
PLACED = "placed"


class Fate(StrEnum):
    """What will happen to an order."""

    PLAIN = "plain"
    TWICE = "twice"
    """Sent twice under the same id, as by an impatient client."""
    REFUSED = "refused"
    """The carrier does not deliver there. No retry will help."""
    FLAKY = "flaky"
    """The carrier's service fails at first, then works."""
    HANGING = "hanging"
    """The carrier's service does not answer the first time."""
    POISON = "poison"
    """The carrier's service always fails."""
    UNLISTED = "unlisted"
    """Its article is missing from the warehouse's list until the demo adds it."""


SHARES = {
    Fate.TWICE: 0.05,
    Fate.REFUSED: 0.02,
    Fate.FLAKY: 0.05,
    Fate.HANGING: 0.002,
    Fate.POISON: 0.001,
    Fate.UNLISTED: 0.0,
}
"""Fractions of all orders, at least one of each. The others are plain."""


class DemoOrder(msgspec.Struct, frozen=True):
    id: str
    article: str
    pieces: int
    fate: Fate

    @classmethod
    def of(cls, transaction: Transaction) -> DemoOrder:
        """The order that a transaction carries."""
        return msgspec.convert({"id": transaction.id, **transaction.payload["object"]}, cls)

    def placed(self) -> Transaction:
        """The fact that it was placed. It always has the same id."""
        details = {"article": self.article, "pieces": self.pieces, "fate": str(self.fate)}
        return Transaction(
            id=self.id, payload={"subject": f"order:{self.id}", "predicate": PLACED, "object": details}
        )


def make_orders(number: int, seed: int) -> list[DemoOrder]:
    """Make `number` different orders."""
    random = Random(seed)
    fates = [fate for fate, share in SHARES.items() for _ in range(max(1, round(number * share)))]
    fates += [Fate.PLAIN] * (number - len(fates))
    random.shuffle(fates)
    return [
        DemoOrder(
            f"order-{position:06}",
            NEW_ARTICLE if fate is Fate.UNLISTED else random.choice(ARTICLES),
            random.randint(1, 9),
            fate,
        )
        for position, fate in enumerate(fates, start=1)
    ]


def make_messages(orders: Sequence[DemoOrder], seed: int) -> list[Transaction]:
    """The orders as messages; those sent twice appear again somewhere later."""
    random = Random(seed)
    places = [(float(place), order) for place, order in enumerate(orders)]
    places += [
        (random.uniform(place, len(orders)), order) for place, order in places if order.fate is Fate.TWICE
    ]
    places.sort(key=lambda placed: placed[0])
    return [order.placed() for _, order in places]
