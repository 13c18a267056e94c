"""What became of every order, by the tables of the three services and by what was published to the feed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from onceward.transaction import Transaction
from tests.campaign.chain.premises import TABLES, Premises

Order = tuple[str, int]
STAGES = {"charging": "charged", "shipping": "shipped"}


class ChainTally(NamedTuple):
    """Orders by what went wrong, as `service order`."""

    lost: list[str]
    """Placed, but not charged, not shipped, or not published."""
    doubled: list[str]
    """Charged or shipped more than once."""
    phantom: list[str]
    """Done or published without the row that it is about."""
    renamed: list[str]
    """Published under more than one id."""
    disorder: list[str]
    """Done or published before an earlier order of the same customer."""
    dead: list[str]
    """Dead letters: nothing was wrong with any order."""

    @property
    def is_clean(self) -> bool:
        return not any(self)


class Published(NamedTuple):
    """The feed: what arrived, without copies, and how many copies there were."""

    first: dict[str, list[Order]]
    """By what happened, in the order of arrival."""
    ids: dict[tuple[str, Order], set[str]]
    phantoms: list[str]
    copies: int


def unfinished(made: Premises) -> int:
    """How many orders are not shipped yet, and how many messages wait in the outboxes."""
    [(placed,)] = made.rows("orders", "SELECT count(*) FROM orders")
    [(shipped,)] = made.rows(
        "shipping", "SELECT count(*) FROM (SELECT DISTINCT customer, number FROM shipments) AS s"
    )
    waiting = sum(
        made.rows(name, "SELECT count(*) FROM onceward_outbox WHERE state NOT IN ('published', 'moved')")[0][
            0
        ]
        for name in TABLES
    )
    return int(placed - shipped + waiting)


def count(made: Premises) -> tuple[ChainTally, int]:
    """Return what went wrong, and how many copies with the same id were published."""
    tally = ChainTally([], [], [], [], [], [])
    feed = published(made.read_feed())
    done = {name: _orders(made, name) for name in TABLES}
    placed = set(done["orders"])
    for name, orders in done.items():
        tally.doubled.extend(_names(name, [order for order, times in Counter(orders).items() if times > 1]))
        tally.lost.extend(_names(name, placed - set(orders)))
        tally.phantom.extend(_names(name, set(orders) - placed))
        tally.disorder.extend(_names(name, disorder(orders)))
        what = STAGES.get(name, "placed")
        heard = feed.first.get(what, [])
        tally.lost.extend(_names(f"feed: {what}", set(orders) - set(heard)))
        tally.phantom.extend(_names(f"feed: {what}", set(heard) - set(orders)))
        tally.disorder.extend(_names(f"feed: {what}", disorder(heard)))
        letters = made.rows(name, "SELECT consumer, message_id FROM onceward_dead_letters")
        tally.dead.extend(f"{name} {consumer} {message}" for consumer, message in letters)
    tally.phantom.extend(feed.phantoms)
    tally.renamed.extend(_names("feed", [order for (_, order), ids in feed.ids.items() if len(ids) > 1]))
    return tally, feed.copies


def published(arrived: Iterable[Transaction]) -> Published:
    found = Published({}, defaultdict(set), [], 0)
    seen: set[str] = set()
    copies = 0
    for each in arrived:
        what, order = each.payload["what"], (each.payload["customer"], each.payload["number"])
        if each.payload.get("phantom"):
            found.phantoms.append(f"feed: {what} {order}")
        found.ids[what, order].add(each.id)
        if each.id in seen:
            copies += 1
        else:
            seen.add(each.id)
            found.first.setdefault(what, []).append(order)
    return found._replace(copies=copies)


def _orders(made: Premises, name: str) -> list[Order]:
    rows = made.rows(name, f"SELECT customer, number FROM {TABLES[name]} ORDER BY at")
    return [(customer, number) for customer, number in rows]


def disorder(orders: Iterable[Order]) -> list[Order]:
    last: dict[str, int] = {}
    found: list[Order] = []
    for customer, number in orders:
        if number < last.get(customer, 0):
            found.append((customer, number))
        last[customer] = number
    return found


def _names(where: str, orders: Iterable[Order]) -> list[str]:
    return [f"{where} {customer}/{number}" for customer, number in sorted(orders)]
