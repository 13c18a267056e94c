"""A consumer for the command line: `tests.support.deadletters.shop:Bill`."""

from __future__ import annotations

import os
import signal
from typing import Any

from onceward import AsyncConsumerTask, ConsumerTask, Onceward, Transaction
from tests.support.deadletters.world import contract

INSERT = "INSERT INTO bills VALUES (:id, :amount)"


class Bill(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.execute(INSERT, {"id": transaction.id, "amount": transaction.payload["amount"]})


class AsyncBill(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:
        await session.execute(INSERT, {"id": transaction.id, "amount": transaction.payload["amount"]})


class Kills(Bill):
    """Not fixed yet: some payloads still kill its process."""

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        if transaction.payload["amount"] == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        super().process_transaction(transaction, session)


def make_bill() -> Bill:
    from onceward.connectors import MemoryConnector

    return Bill({"source": MemoryConnector()})


app = Onceward("shop", database="sqlite://")


@app.consumer("memory://orders", contract=contract())
def charge(order: Any, session: Any, transaction: Transaction) -> None:
    session.execute(INSERT, {"id": transaction.id, "amount": order["amount"]})


served = Onceward("served", database="sqlite://")


@served.service
def payments() -> list[Any]:
    raise AssertionError("a dry run opens no services")


@served.consumer("memory://served", contract=contract())
def charge_card(order: Any, payments: list[Any], session: Any, transaction: Transaction) -> None:
    if order["amount"] == 0:
        payments.append(order)
    session.execute(INSERT, {"id": transaction.id, "amount": order["amount"]})


not_a_task = 7
