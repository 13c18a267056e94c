"""Three services: orders are placed, charged and shipped. Each has a database of its own, and sends to the next through
its outbox. What happened is also sent to the feed, which nobody consumes, so it shows everything that was published.

No table has a unique key: what is done twice has two rows.
"""

from __future__ import annotations

import os
import time
from typing import Any

from onceward import Contract, Onceward

LEASE = 3
SECONDS = 0.002
"""That a handler takes, so kills hit it in the middle."""
POLICY = {"loop": {"concurrency": {"value": 8}}}


def address(name: str) -> str:
    """The URL of a database or a queue, from the environment."""
    return os.environ.get(f"CHAIN_{name}", f"sqlite:///{name.lower()}.db")


def contract(name: str, event_type: str) -> Contract:
    return Contract(
        consumer_id=name,
        event_types=[event_type],
        owner_team="campaign",
        idempotency_mechanism="the row, the messages and the inbox's record are one transaction",
        sequencing="strict",
        lease=LEASE,
    )


def describe(order: dict[str, Any], what: str) -> dict[str, Any]:
    """The headers of an event of this order: the events of a customer are numbered."""
    return {"event_type": what, "aggregate_id": order["customer"], "sequence": order["number"]}


def tell(order: dict[str, Any], what: str) -> dict[str, Any]:
    return {**order, "what": what}


orders = Onceward("orders", database=address("ORDERS"))
charging = Onceward("charging", database=address("CHARGING"))
shipping = Onceward("shipping", database=address("SHIPPING"))


@charging.consumer(address("CHARGE"), contract=contract("charge", "placed"), policy=POLICY)
def charge(order: dict, session: Any) -> None:  # type: ignore[type-arg]
    session.execute("INSERT INTO charges (customer, number) VALUES (:customer, :number)", order)
    time.sleep(SECONDS)
    session.send(address("SHIP"), order, key=order["customer"], headers=describe(order, "charged"))
    session.send(address("FEED"), tell(order, "charged"), key=order["customer"])


@shipping.consumer(address("SHIP"), contract=contract("ship", "charged"), policy=POLICY)
def ship(order: dict, session: Any) -> None:  # type: ignore[type-arg]
    session.execute("INSERT INTO shipments (customer, number) VALUES (:customer, :number)", order)
    time.sleep(SECONDS)
    session.send(address("FEED"), tell(order, "shipped"), key=order["customer"], name="shipped")
