"""A real consumer of a boundary for the crash tests: an engine with an inbox that dies where its arguments say.

The product knows nothing of these points: the process patches its own copy of a connector.
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
from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.connectors.boundary import AsyncBoundaryConnector, BoundaryConnector
from onceward.deadletters import AsyncDeadLetters, DeadLetters
from onceward.deadletters.source import AsyncWithDeadLetters, WithDeadLetters
from onceward.inbox import AsyncInbox, Contract, Inbox
from onceward.task.exceptions import ExceptionCategory, TransactionException
from tests.support.world import consuming

RECEIVER = "receiver"
REFUSED = 13
"""The number of the fact that a worker with dead letters refuses."""
CONTRACT = Contract(
    consumer_id="billing",
    event_types=["made"],
    owner_team="payments",
    idempotency_mechanism="dedup row and bill in one transaction",
    lease=1.0,  # for this long, other workers may not take what a killed worker has started
    poison_after=100,
)


@dataclass(frozen=True)
class Orders:
    url: str
    database: str
    asynchronous: bool
    point: str | None = None
    """handler, settle, confirm, confirmed, buried; None: it lives."""
    after: int = 0
    """How often it passes the point before it dies."""
    letters: bool = False


class Death:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._left = orders.after

    def at(self, point: str) -> None:
        if point == self._orders.point:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def values_of(transaction: Transaction, letters: bool) -> dict[str, Any]:
    number = transaction.payload["object"]["number"]
    if letters and number == REFUSED:
        raise TransactionException("no such batch", category=ExceptionCategory.BUSINESS)
    return {"id": transaction.id, "number": number}


BILL = "INSERT INTO bills (id, number) VALUES (:id, :number)"
POLICY = consuming(batch=10, concurrency=4, mode="continuous")


def run(orders: Orders) -> None:
    asyncio.run(_run_async(orders)) if orders.asynchronous else _run(orders)


def _run(orders: Orders) -> None:
    death = Death(orders)

    class Bill(ConsumerTask):
        contract = CONTRACT

        def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
            session.execute(BILL, values_of(transaction, orders.letters))
            death.at("handler")

    class Mortal(BoundaryConnector):
        async def _call(self, method: str, *arguments: Any) -> Any:
            death.at(method)
            answer = await super()._call(method, *arguments)
            death.at(f"{method}ed")
            return answer

        def settle_transactions(self, settlements: Any, /) -> None:
            death.at("settle")
            super().settle_transactions(settlements)

        def forget_dead(self, keys: Any) -> None:
            death.at("buried")
            super().forget_dead(keys)

    engine = create_engine(f"sqlite:///{orders.database}")
    with BoundaryClient(orders.url) as client:
        source: Any = Mortal(client, RECEIVER)
        if orders.letters:
            source = WithDeadLetters(source, DeadLetters(engine), consumer="billing")
        Bill({"source": source}, {"inbox": Inbox(engine)}).consume_transactions(POLICY)


async def _run_async(orders: Orders) -> None:
    death = Death(orders)

    class Bill(AsyncConsumerTask):
        contract = CONTRACT

        async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
            await session.execute(BILL, values_of(transaction, orders.letters))
            death.at("handler")

    class Mortal(AsyncBoundaryConnector):
        async def _call(self, method: str, *arguments: Any) -> Any:
            death.at(method)
            answer = await super()._call(method, *arguments)
            death.at(f"{method}ed")
            return answer

        async def settle_transactions_async(self, settlements: Any, /) -> None:
            death.at("settle")
            await super().settle_transactions_async(settlements)

        async def forget_dead_async(self, keys: Any) -> None:
            death.at("buried")
            await super().forget_dead_async(keys)

    engine = create_async_engine(f"sqlite+aiosqlite:///{orders.database}")
    async with AsyncBoundaryClient(orders.url) as client:
        source: Any = Mortal(client, RECEIVER)
        if orders.letters:
            source = AsyncWithDeadLetters(source, AsyncDeadLetters(engine), consumer="billing")
        await Bill({"source": source}, {"inbox": AsyncInbox(engine)}).consume_transactions(POLICY)
    await engine.dispose()
