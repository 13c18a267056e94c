"""What became of every order, by the tables of the shop, the provider's book and the dead letters."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from tests.campaign.field import CONSUMERS, Field
from tests.campaign.orders import Order


class Tally(NamedTuple):
    """Orders by what went wrong, as `consumer order`."""

    lost: list[str]
    """Without an effect and without a dead letter."""
    doubled: list[str]
    """With more than one effect."""
    stuck: list[str]
    """Of the lost: still waiting in the source or in flight."""
    conflicts: list[str]
    """With an effect and a dead letter."""
    innocent_dead: list[str]
    """A dead letter, although nothing was wrong with the order."""
    wrong: list[str]
    """Refused or deadly, but with an effect."""

    @property
    def is_clean(self) -> bool:
        return not any(self)


def count(field: Field, orders: Sequence[Order], *, finished: bool) -> Tally:
    """Compare effects and dead letters with what each order deserves. `finished`: nothing waits any more."""
    tally = Tally([], [], [], [], [], [])
    for consumer, order, effects, is_dead in _fates(field, orders):
        name = f"{consumer} {order.number}"
        if not effects and not is_dead:
            (tally.lost if finished else tally.stuck).append(name)
        if effects > 1:
            tally.doubled.append(name)
        if effects and is_dead:
            tally.conflicts.append(name)
        if order.fate == "innocent" and is_dead and not effects:
            tally.innocent_dead.append(name)
        if order.fate != "innocent" and effects:
            tally.wrong.append(name)
    return tally


def unfinished(field: Field, orders: Sequence[Order]) -> int:
    """How many orders have neither an effect nor a dead letter, and how many messages wait."""
    without = sum(not effects and not is_dead for _, _, effects, is_dead in _fates(field, orders))
    return without + sum(field.waiting(consumer) for consumer in CONSUMERS)


def _fates(field: Field, orders: Sequence[Order]) -> Iterator[tuple[str, Order, int, bool]]:
    charges = Counter(number for (number,) in field.rows("SELECT number FROM charges"))
    with closing(sqlite3.connect(field.directory / "provider.db", timeout=60)) as book:
        shipments = Counter(number for (number,) in book.execute("SELECT number FROM shipments"))
    letters = set(field.rows("SELECT consumer, message_id FROM onceward_dead_letters"))
    for consumer, effects in zip(CONSUMERS, (charges, shipments), strict=True):
        for order in orders:
            is_dead = any((consumer, each.id) in letters for each in order.messages)
            yield consumer, order, effects[order.number], is_dead
