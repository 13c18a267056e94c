"""The two tasks of the demo, with their policies: all that a user of onceward writes.

They open nothing themselves. Queue, card service and ledger are given to them.
"""

from __future__ import annotations

from onceward import ConsumerTask, ProducerTask, Transaction
from onceward.cli.demo.cards import CardExpired
from onceward.cli.demo.orders import Order, message_number
from onceward.cli.demo.setup import SLOTS, STEP_TIMEOUT, Setup
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy


class SendOrder(ProducerTask):
    """Puts orders into the queue, and shows that it does."""

    def produce_transaction(self, transaction: Transaction) -> None:
        self.connectors["queue"].dispatch_transactions([transaction])

    def handle_produce_success(self, transaction: Transaction, result: object) -> None:
        self.services["screen"].sent()


class ApplyOrder(ConsumerTask):
    """Takes orders from the queue, has their cards checked, and writes them into the ledger."""

    def process_transaction(self, transaction: Transaction) -> bool:
        order = Order.of(transaction)
        try:
            self.services["cards"].check(order)
        except CardExpired as error:
            raise TransactionException(str(error), ExceptionCategory.BUSINESS) from error
        applied: bool = self.services["ledger"].apply(order, message_number(transaction))
        return applied


def producing() -> ProducerPolicy:
    return ProducerPolicy.model_validate(
        {
            "loop": {"batch": {"size": 100}},
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
