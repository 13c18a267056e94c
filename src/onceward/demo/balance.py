"""Check that the books balance: nothing lost between two stages, and every effect once, to the piece.

produced  = appended + duplicates       at the shop
appended  = forwarded                   the same facts in the same order in both logs
forwarded = applied + dead letters      each applied once, at the warehouse
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import msgspec

from onceward.demo.orders import DemoOrder

NAMED_IDS = 5
"""How many ids a problem names."""


class DemoEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What each stage has, read from where it is stored, not from what workers report."""

    produced: int
    """Messages acknowledged to the producer."""
    duplicates: int
    """Appends of messages that the shop's server already had."""
    shop: list[str]
    """The ids in the shop's log, in order."""
    warehouse: list[str]
    effects: dict[str, int]
    """How often each order was shipped."""
    dead: set[str]
    """Orders with an open dead letter."""
    stock: dict[str, int]
    """Pieces shipped, by article."""


class DemoBalance(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all stages. `problems` is empty if they balance."""

    messages: int
    produced: int
    duplicates: int
    appended: int
    forwarded: int
    same_log: bool
    """Both zones have the same facts in the same order."""
    applied: int
    """Orders with an effect."""
    dead_letters: int
    lost: int
    """Orders with neither an effect nor a dead letter."""
    twice: int
    """Orders with more than one effect."""
    expected_pieces: int
    """Pieces that the applied orders asked for."""
    pieces: int
    """Pieces shipped according to the stock."""
    problems: tuple[str, ...]


def compute_balance(orders: Sequence[DemoOrder], messages: int, found: DemoEvidence) -> DemoBalance:
    """Compare each stage with the one before it."""
    ordered = {order.id for order in orders}
    applied = found.effects.keys()
    lost = ordered - applied - found.dead
    twice = {order for order, times in found.effects.items() if times > 1}
    expected = Counter[str]()
    for order in orders:
        if order.id in applied:
            expected[order.article] += order.pieces
    return DemoBalance(
        messages=messages,
        produced=found.produced,
        duplicates=found.duplicates,
        appended=len(found.shop),
        forwarded=len(found.warehouse),
        same_log=found.shop == found.warehouse,
        applied=len(applied),
        dead_letters=len(found.dead),
        lost=len(lost),
        twice=len(twice),
        expected_pieces=expected.total(),
        pieces=sum(found.stock.values()),
        problems=(
            *_about_producing(messages, found),
            *_about_orders("not in the shop's log", ordered - set(found.shop)),
            *_about_forwarding(found),
            *_about_orders("neither shipped nor a dead letter", lost),
            *_about_orders("shipped more than once", twice),
            *_about_orders("both shipped and a dead letter", applied & found.dead),
            *_about_orders("in the books but were never placed", (applied | found.dead) - ordered),
            *_about_stock(expected, found.stock),
        ),
    )


def _about_producing(messages: int, found: DemoEvidence) -> list[str]:
    problems = []
    if found.produced != messages:
        problems.append(f"{found.produced:,} of {messages:,} messages were produced")
    if found.produced != len(found.shop) + found.duplicates:
        problems.append(
            f"{found.produced:,} messages were produced, but {len(found.shop):,} were appended and "
            f"{found.duplicates:,} were duplicates"
        )
    return problems


def _about_forwarding(found: DemoEvidence) -> list[str]:
    missing, foreign = set(found.shop) - set(found.warehouse), set(found.warehouse) - set(found.shop)
    problems = [
        *_about_orders("in the shop's log but not in the warehouse's", missing),
        *_about_orders("in the warehouse's log but not in the shop's", foreign),
    ]
    if not problems and found.shop != found.warehouse:
        return ["the warehouse has the shop's facts more than once or in another order"]
    return problems


def _about_orders(what: str, ids: Set[str]) -> list[str]:
    if not ids:
        return []
    more = ", ..." if len(ids) > NAMED_IDS else ""
    return [f"{len(ids):,} orders are {what}: {', '.join(sorted(ids)[:NAMED_IDS])}{more}"]


def _about_stock(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    return [
        f"{found.get(name, 0):,} pieces of {name} left the stock, but shipped orders ask for {expected.get(name, 0):,}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name, 0) != found.get(name, 0)
    ]
