"""The processes of the dead-letter crash tests. Each kills itself at the named point."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import create_engine

from onceward import ConsumerTask, Transaction
from onceward.connectors import SqliteConnector
from onceward.deadletters import DeadLetters, Filter, Rca, operations
from onceward.deadletters.operations import DeadLetterOperations
from onceward.deadletters.source import WithDeadLetters
from onceward.deadletters.source import base as wrapper
from onceward.inbox import Contract, Inbox
from onceward.storage.database import Sql
from onceward.task.exceptions import ExceptionCategory, TransactionException

LEASE = 0.3
CONTRACT = Contract(
    consumer_id="billing",
    event_types=["order.paid"],
    owner_team="payments",
    idempotency_mechanism="bill and dedup row in one transaction",
    lease=LEASE,
)
FIXED = Rca(category="business", root_cause="the account was missing", fix_ref="v2")


class Orders(NamedTuple):
    folder: Path
    url: str
    connect_args: dict[str, Any]
    point: str = ""
    """Where the process kills itself."""
    fixed: bool = False


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Billing(ConsumerTask):
    contract = CONTRACT
    orders: Orders

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.execute("INSERT INTO bills VALUES (:id)", {"id": transaction.id})
        if transaction.id.startswith("bad"):
            if not self.orders.fixed:
                raise TransactionException("no such account", ExceptionCategory.BUSINESS)
            if self.orders.point == "handling":
                die()


def consume(orders: Orders) -> None:
    """Consume until the source is empty."""
    wrapper.CHECK_EVERY = 0.0
    arm(orders.point)
    engine = create_engine(orders.url, connect_args=orders.connect_args)
    queue = SqliteConnector(orders.folder / "queue.db", lease=LEASE)
    source = WithDeadLetters(queue, DeadLetters(engine), consumer="billing")
    task = Billing({"source": source}, {"inbox": Inbox(engine)})
    task.orders = orders
    task.consume_transactions()
    queue.close()
    engine.dispose()


def redrive(orders: Orders) -> None:
    arm(orders.point)
    letters = DeadLetters(create_engine(orders.url, connect_args=orders.connect_args))
    wanted = Filter(consumer="billing", event_type="order.paid")
    letters.redrive(wanted, rca=FIXED, operator="ann", rate=1000, redrive_id="click")


def arm(point: str) -> None:
    if point == "burying":  # the row is written, but not committed
        after(operations, "bury")
    elif point == "buried":
        after_async(DeadLetterOperations, "take_over")
    elif point == "settling":  # the handler's writes are committed, but the store does not know
        DeadLetterOperations.settle = die  # type: ignore[method-assign, assignment]
    elif point == "settled":
        after_async(DeadLetterOperations, "settle")
    elif point == "scheduling":
        after(Sql, "many")


def after(owner: Any, name: str) -> None:
    real = getattr(owner, name)

    def around(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        die()

    setattr(owner, name, around)


def after_async(owner: Any, name: str) -> None:
    real = getattr(owner, name)

    async def around(*args: Any) -> Any:
        await real(*args)
        die()

    setattr(owner, name, around)
