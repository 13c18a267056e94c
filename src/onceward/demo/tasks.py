"""The two tasks of the demo, with their policies: all that a user of onceward writes.

They open nothing themselves, but are given connectors, carrier and inbox.
"""

from __future__ import annotations

from typing import Any

from onceward import (
    ConsumerPolicy,
    ConsumerTask,
    Contract,
    ExceptionCategory,
    ProducerPolicy,
    ProducerTask,
    Transaction,
    TransactionException,
)
from onceward.demo.carrier import NotDelivered
from onceward.demo.orders import PLACED, DemoOrder
from onceward.demo.setup import CONSUMER, LEASE, SLOTS, STEP_TIMEOUT, Setup

SHIP = "INSERT INTO shipments VALUES (:id, :article, :pieces, :packed_by)"
TAKE = "UPDATE stock SET shipped = shipped + :pieces WHERE article = :article"


class SendOrder(ProducerTask):
    """Appends orders to the shop's boundary and counts them."""

    def produce_transaction(self, transaction: Transaction) -> None:
        self.connectors["shop"].dispatch_transactions([transaction])

    def handle_produce_success(self, transaction: Transaction, result: object) -> None:
        self.services["tally"].add()


class ShipOrder(ConsumerTask):
    """Takes orders from the warehouse's boundary, asks the carrier, and ships them.

    What it writes through the session commits together with the inbox's record that the order is done. The carrier
    comes first: in `effectful` mode the database is not locked while an outside service takes its time.
    """

    contract = Contract(
        consumer_id=CONSUMER,
        event_types=[PLACED],
        owner_team="warehouse",
        idempotency_mechanism="shipment, stock and dedup record in one transaction",
        mode="effectful",
        lease=LEASE,
    )

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        order = DemoOrder.of(transaction)
        try:
            self.services["carrier"].check(order)
        except NotDelivered as error:
            raise TransactionException(str(error), ExceptionCategory.BUSINESS) from error
        shipment = {"id": order.id, "article": order.article, "pieces": order.pieces}
        session.execute(SHIP, {**shipment, "packed_by": self.services["packer"]})
        if session.execute(TAKE, shipment) == 0:
            raise TransactionException(f"{order.article} is not in our list", ExceptionCategory.BUSINESS)


def producing(setup: Setup) -> ProducerPolicy:
    return ProducerPolicy.model_validate(
        {
            "loop": {"batch": {"size": setup.batch}, "concurrency": {"value": 8}},
            "steps": {"produce": {"retry": {"max_attempts": 3, "backoff": 0.05}}},
        }
    )


def consuming(setup: Setup) -> ConsumerPolicy:
    return ConsumerPolicy.model_validate(
        {
            "loop": {
                "streaming": True,
                "mode": "continuous",
                "concurrency": {"value": SLOTS},
                "batch": {"size": setup.batch},
                "empty_queue": {"backoff": 0.05, "backoff_cap": 0.25},
            },
            "steps": {
                "fetch": {"retry": {"max_attempts": 5, "backoff": 0.1}},
                "process": {"retry": {"max_attempts": 3, "timeout": STEP_TIMEOUT, "backoff": 0.05}},
            },
        }
    )
