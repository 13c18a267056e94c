"""Consumers whose keys or rows depend on the process, and their correct twins."""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from typing import Any

from onceward import AsyncConsumerTask, ConsumerTask, Onceward, Transaction
from onceward.inbox import InboxSession
from tests.verification.consumers import EVENTS, INSERT, contract, setup, values

RUN = uuid.uuid4().hex
STARTED = time.time()
RATE = int(os.environ.get("SHOP_RATE", "2"))
numbers = itertools.count()
app = Onceward("shop", database="sqlite:///shop.db")


class Cards:
    def charge(self, total: int, reference: object, **more: object) -> None:
        raise AssertionError("the real one")


class FakeCards(Cards):
    """Keeps no books, so only its arguments show what a provider would see."""

    def charge(self, total: int, reference: object, **more: object) -> None: ...


@app.service
def cards() -> Cards:
    return Cards()


verification = {"events": EVENTS[:2], "setup": setup, "services": {Cards: FakeCards}}


def tags(transaction: Transaction) -> set[str]:
    return {f"{color}-{transaction.id}" for color in ("red", "green", "blue", "white", "black")}


KEYS: dict[str, Any] = {
    "hash": lambda transaction: hash(transaction.id),
    "set": lambda transaction: "-".join(tags(transaction)),
    "frozenset": lambda transaction: hash(frozenset(tags(transaction))),
    "import": lambda transaction: f"{RUN}-{transaction.id}",
    "start": lambda transaction: f"{STARTED}-{transaction.id}",
    "counter": lambda transaction: f"charge-{next(numbers)}",
}


class WritesIt(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("INSERT INTO bills (id) VALUES (:id)", {"id": str(self.services["key"](transaction))})


class AsyncWritesIt(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute(
            "INSERT INTO bills (id) VALUES (:id)", {"id": str(self.services["key"](transaction))}
        )


class SendsIt(ConsumerTask):
    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        own = self.services["key"](transaction)
        session.effect("charge", lambda _: self.services["cards"].charge(1, reference=own))


@app.consumer(
    "memory://a", contract=contract(consumer_id="pids", mode="effectful"), verification=verification
)
def process_id(transaction: Transaction, session: InboxSession, cards: Cards) -> None:
    session.effect("charge", lambda key: cards.charge(1, "", headers={"Idempotency-Key": os.getpid()}))


@app.consumer(
    "memory://b", contract=contract(consumer_id="keyed", mode="effectful"), verification=verification
)
def right(transaction: Transaction, session: InboxSession, cards: Cards) -> None:
    """Its worker has an id, which goes into logs and along with calls."""
    logging.getLogger(__name__).info("worker %s", RUN)
    session.effect("charge", lambda key: cards.charge(RATE, key, worker=RUN, tags=tags(transaction)))
    session.effect("mail", lambda _: cards.charge(1, f"mail-{transaction.id}", worker=RUN, at=time.time()))
    session.execute(INSERT, {**values(transaction), "total": RATE})
