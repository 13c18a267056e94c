"""Consumers that send messages: a right one in each mode, and wrong ones that the kit must catch."""

from __future__ import annotations

import tempfile
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onceward import Onceward, Transaction
from onceward.connectors.codec import PayloadError
from tests.verification.consumers import contract

FOLDER = Path(tempfile.gettempdir())
LIVE = FOLDER / "onceward-test-live-sink.db"
"""A real sink: nothing of a verification may arrive there."""
app = Onceward("senders", database=f"sqlite:///{FOLDER}/onceward-test-senders.db")
BILL = "INSERT INTO bills (id, total) VALUES (:id, :total)"
memory: list[str] = []


@app.consumer(f"sqlite:///{LIVE}", contract=None)
def ship(order: dict) -> None:  # type: ignore[type-arg]
    pass


def consumer(function: Any) -> Any:
    name = function.__name__
    return app.consumer(f"sqlite:///{FOLDER}/onceward-test-{name}.db", contract=contract(consumer_id=name))(
        function
    )


def save(transaction: Transaction, session: Any) -> Any:
    return session.execute(BILL, {"id": transaction.id, "total": transaction.payload["total"]})


@consumer
def right(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    session.send(ship, transaction.payload, key="customer", headers={"event_type": "billed"})
    session.send(f"sqlite:///{LIVE}", {"total": 1}, name="again", delay=3600)


@consumer
async def right_async(transaction: Transaction, session: Any) -> None:
    await save(transaction, session)
    await session.send(ship, transaction.payload, key="customer", headers={"event_type": "billed"})


@consumer
def new_ids(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    session.send(ship, transaction.payload, id=str(uuid.uuid4()))


@consumer
def into_memory(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    session.send("memory://orders", transaction.payload)


@consumer
def ids_of_the_day(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    session.send(ship, transaction.payload, id=f"{transaction.id}-{datetime.now(UTC):%Y-%m}")


@consumer
def on_the_connection(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    session.run(lambda each: app.outbox(each.connection).send(ship, transaction.payload))


@consumer
def swallows(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    with suppress(Exception):
        session.send(ship, transaction.payload)


@consumer
def swallows_what_cannot_be_sent(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    with suppress(Exception):
        session.send(ship, object())


@consumer
def sends_something_else_instead(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    try:
        session.send(ship, object())
    except PayloadError:
        session.send(ship, {"total": None})


@consumer
def fewer_on_a_repeat(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    session.send(ship, transaction.payload, name="first")
    if transaction.id not in memory:
        memory.append(transaction.id)
        session.send(ship, transaction.payload, name="second")


@consumer
def in_the_order_of_a_set(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    for item in {"book", "pen", "lamp", "chair"}:
        session.send(ship, item)


@consumer
def on_its_own_connection(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    engine = app.create_engine()
    with engine.begin() as connection:
        app.outbox(connection).send(ship, transaction.payload)  # outside
    engine.dispose()


@consumer
def produces(transaction: Transaction, session: Any) -> None:
    save(transaction, session)
    app.produce(reminders, transaction.payload)


@app.producer(ship)
def reminders(order: dict) -> Any:  # type: ignore[type-arg]
    return order
