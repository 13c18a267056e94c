"""Whether the books balance: every order that was produced is applied or a dead letter, once, to the cent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import msgspec

from onceward.cli.demo.orders import Order

SHOWN = 5
"""How many ids a problem names."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """Orders and cents. `problems` is empty when everything is as it must be."""

    produced: int
    applied: int
    dead_lettered: int
    lost: int
    expected_cents: int
    """What the applied orders are worth, by the list they were made from."""
    ledger_cents: int
    """What the accounts of the ledger hold."""
    problems: tuple[str, ...]

    @property
    def balanced(self) -> bool:
        return not self.problems


def strike_balance(
    orders: Sequence[Order],
    applied: Set[str],
    dead: Set[str],
    accounts: Mapping[str, int],
    left_in_queue: int,
) -> Balance:
    """Compare what was produced with where it ended. Nothing here is taken from what workers report."""
    produced = {order.id for order in orders}
    expected = Counter[str]()
    for order in orders:
        if order.id in applied:
            expected[order.account] += order.cents
    lost = produced - applied - dead
    return Balance(
        produced=len(produced),
        applied=len(applied),
        dead_lettered=len(dead),
        lost=len(lost),
        expected_cents=expected.total(),
        ledger_cents=sum(accounts.values()),
        problems=(
            *_about_orders("neither applied nor a dead letter", lost),
            *_about_orders("both applied and a dead letter", applied & dead),
            *_about_orders("in the books, but never produced", (applied | dead) - produced),
            *_about_accounts(expected, accounts),
            *([f"{left_in_queue:,} messages are still in the queue"] if left_in_queue else []),
        ),
    )


def _about_orders(what: str, ids: Set[str]) -> list[str]:
    if not ids:
        return []
    more = ", ..." if len(ids) > SHOWN else ""
    return [f"{len(ids):,} orders are {what}: {', '.join(sorted(ids)[:SHOWN])}{more}"]


def _about_accounts(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    return [
        f"{name} holds {found.get(name, 0):,} cents where its applied orders are worth {expected.get(name, 0):,}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name, 0) != found.get(name, 0)
    ]
