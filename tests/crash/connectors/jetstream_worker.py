"""A real consumer of a JetStream stream for the crash tests: an engine with an inbox that dies where its arguments say.

The product knows nothing of these points: the process patches its own copy of the connection.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.connectors.jetstream import AsyncJetStreamConnector, JetStreamConnector
from onceward.connectors.jetstream.letters import JetStreamLetters
from onceward.connectors.jetstream.line import QueueLine
from onceward.inbox import AsyncInbox, Contract, Inbox
from onceward.task.exceptions import ExceptionCategory, TransactionException
from tests.support.world import consuming

STREAM = "ORDERS"
LEASE = 1.0
REFUSED = 13
"""The number of the message that every worker refuses."""
CONTRACT = Contract(
    consumer_id="billing",
    event_types=["ordered"],
    owner_team="payments",
    idempotency_mechanism="dedup row and bill in one transaction",
    lease=LEASE,
    poison_after=100,
)


@dataclass(frozen=True)
class JetStreamOrders:
    url: str
    database: str
    asynchronous: bool
    point: str | None = None
    """pulled, handler, acknowledge, acknowledged, letter, buried; None: it lives."""
    after: int = 0
    """How often it passes the point before it dies."""


class WorkerDeath:
    def __init__(self, orders: JetStreamOrders) -> None:
        self._orders = orders
        self._left = orders.after

    def at(self, point: str) -> None:
        if point == self._orders.point:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        pull, tell, keep = QueueLine.pull, QueueLine.tell, JetStreamLetters.keep

        async def mortal_pull(line: QueueLine, *arguments: Any) -> Any:
            found = await pull(line, *arguments)
            if found:
                self.at("pulled")
            return found

        async def mortal_tell(line: QueueLine, messages: Any) -> None:
            done = any(data == b"+ACK" for _, data in messages)
            if done:
                self.at("acknowledge")
            await tell(line, messages)
            if done:
                self.at("acknowledged")

        async def mortal_keep(letters: JetStreamLetters, *arguments: Any) -> None:
            self.at("letter")
            await keep(letters, *arguments)
            self.at("buried")

        QueueLine.pull, QueueLine.tell = mortal_pull, mortal_tell  # type: ignore[method-assign,assignment]
        JetStreamLetters.keep = mortal_keep  # type: ignore[method-assign,assignment]


def values_of(transaction: Transaction) -> dict[str, Any]:
    number = transaction.payload["number"]
    if number == REFUSED:
        raise TransactionException("no such customer", category=ExceptionCategory.BUSINESS)
    return {"id": transaction.id, "number": number}


BILL = "INSERT INTO bills (id, number) VALUES (:id, :number)"
POLICY = consuming(batch=10, concurrency=4, mode="continuous")


def run(orders: JetStreamOrders) -> None:
    """Consume until the stream is empty, or death."""
    death = WorkerDeath(orders)
    death.install()
    asyncio.run(_run_async(orders, death)) if orders.asynchronous else _run(orders, death)


def _run(orders: JetStreamOrders, death: WorkerDeath) -> None:
    class Bill(ConsumerTask):
        contract = CONTRACT

        def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
            session.execute(BILL, values_of(transaction))
            death.at("handler")

    engine = create_engine(f"sqlite:///{orders.database}")
    with JetStreamConnector(orders.url, STREAM, lease=LEASE) as source:
        Bill({"source": source}, {"inbox": Inbox(engine)}).consume_transactions(POLICY)


async def _run_async(orders: JetStreamOrders, death: WorkerDeath) -> None:
    class Bill(AsyncConsumerTask):
        contract = CONTRACT

        async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
            await session.execute(BILL, values_of(transaction))
            death.at("handler")

    engine = create_async_engine(f"sqlite+aiosqlite:///{orders.database}")
    async with AsyncJetStreamConnector(orders.url, STREAM, lease=LEASE) as source:
        await Bill({"source": source}, {"inbox": AsyncInbox(engine)}).consume_transactions(POLICY)
    await engine.dispose()
