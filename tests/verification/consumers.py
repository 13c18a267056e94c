"""Deliberately wrong consumers, each with its correct twin. The kit must catch the first and pass the second."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.inbox import Contract, Event

INSERT = "INSERT INTO bills (id, total) VALUES (:id, :total)"
EVENTS = [
    {"tracking_id": f"order-{number}", "payload": {"total": number * 10}, "event_type": "order"}
    for number in (1, 2, 3)
]
OUTSIDE = Path(tempfile.gettempdir()) / "onceward-test-outside.txt"
"""A file that stands for the outside world."""


def setup(engine: Engine) -> None:
    with engine.begin() as connection:
        for table in (
            "bills (id TEXT, total INTEGER)",
            "marks (id TEXT PRIMARY KEY)",
            "prices (item TEXT PRIMARY KEY, price INTEGER, version INTEGER)",
            "charges (effect_key TEXT PRIMARY KEY, total INTEGER)",
        ):
            connection.execute(text(f"CREATE TABLE {table}"))


def contract(**more: Any) -> Contract:
    return Contract(
        **{
            "consumer_id": "billing",
            "event_types": ["order"],
            "owner_team": "tests",
            "idempotency_mechanism": "bill and dedup record in one transaction",
            **more,
        }
    )


def values(transaction: Transaction) -> dict[str, Any]:
    return {"id": transaction.id, "total": transaction.payload["total"]}


class Right(ConsumerTask):
    """The correct twin of most consumers here."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))
        session.execute("INSERT INTO marks VALUES (:id)", {"id": transaction.id})


class AsyncRight(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute(INSERT, values(transaction))
        await session.execute("INSERT INTO marks VALUES (:id)", {"id": transaction.id})


def bill(event: Event, session: Any) -> None:
    """A handler of `inbox.process`."""
    session.execute(INSERT, {"id": event.tracking_id, "total": event.payload["total"]})


async def bill_async(event: Event, session: Any) -> None:
    await session.execute(INSERT, {"id": event.tracking_id, "total": event.payload["total"]})


def bill_at_first(event: Event, session: Any) -> None:
    """Takes a second delivery for a duplicate, although the first may have failed."""
    if event.deliveries == 1:
        bill(event, session)


async def bill_at_first_async(event: Event, session: Any) -> None:
    if event.deliveries == 1:
        await bill_async(event, session)


# ── marks before the work ───────────────────────────────────────────────────────────────────────────────


class MarksFirst(ConsumerTask):
    """Has its own dedup table, committed before the work: an event that fails in between is skipped forever."""

    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        with self.services["database"].begin() as connection:
            mark = text("INSERT INTO marks VALUES (:id) ON CONFLICT DO NOTHING")
            if connection.execute(mark, {"id": transaction.id}).rowcount == 0:
                return
        session.execute(INSERT, values(transaction))


class AsyncMarksFirst(AsyncConsumerTask):
    contract = contract(mode="effectful")

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        async with self.services["database"].begin() as connection:
            mark = text("INSERT INTO marks VALUES (:id) ON CONFLICT DO NOTHING")
            if (await connection.execute(mark, {"id": transaction.id})).rowcount == 0:
                return
        await session.execute(INSERT, values(transaction))


class MarksWithTheWork(ConsumerTask):
    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("INSERT INTO marks VALUES (:id)", {"id": transaction.id})
        session.execute(INSERT, values(transaction))


# ── an effect before the check ──────────────────────────────────────────────────────────────────────────


def upcast_and_tell(payload: Any) -> Any:
    OUTSIDE.write_text("an order came")  # line of the effect
    return {**payload, "total": payload["cents"] // 100}


def upcast(payload: Any) -> Any:
    return {**payload, "total": payload["cents"] // 100}


OLD = {1: [{"tracking_id": f"order-{n}", "payload": {"cents": n * 1000}} for n in (1, 2)]}
"""The same events in their old form."""
EVENTS_2 = [{**event, "schema_version": 2} for event in EVENTS[:2]]


class EffectInUpcaster(Right):
    contract = contract(schema_version=2, upcasters={1: upcast_and_tell})


class PureUpcaster(Right):
    contract = contract(schema_version=2, upcasters={1: upcast})


class EffectInInit(Right):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        OUTSIDE.write_text("a consumer started")


# ── a swallowed exception ───────────────────────────────────────────────────────────────────────────────


class Swallows(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> Any:  # type: ignore[override]
        try:
            session.execute(INSERT, values(transaction))
        except Exception as error:
            return {"ok": False, "why": str(error)}
        return {"ok": True}


class TriesAgain(ConsumerTask):
    contract = contract()
    gives_up = False

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        for left in (2, 1, 0):
            session.execute("SAVEPOINT before")
            try:
                session.execute(INSERT, values(transaction))
                return
            except Exception:
                session.execute("ROLLBACK TO SAVEPOINT before")
                if not left and not self.gives_up:
                    raise


class GivesUp(TriesAgain):
    gives_up = True


class SwallowsItsOwn(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> Any:  # type: ignore[override]
        try:
            if transaction.payload["total"] < 0:
                raise ValueError("a negative total")
            session.execute(INSERT, values(transaction))
        except ValueError:
            return False
        return True


class Recovers(ConsumerTask):
    """Catches an error and does the work anyway: that is not swallowing."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        if transaction.payload["total"] < 0:
            raise ValueError("a negative total")
        try:
            session.execute(INSERT, values(transaction))
        except OSError:
            session.execute(INSERT, values(transaction))


# ── an upsert that goes back in time ────────────────────────────────────────────────────────────────────

PRICES = [
    {
        "tracking_id": f"price-{number}",
        "payload": {"item": "tea", "price": 100 + number},
        "event_type": "order",
        "aggregate_id": "tea",
        "sequence": number,
    }
    for number in (1, 2)
]
UPSERT = """INSERT INTO prices (item, price, version) VALUES (:item, :price, :version)
    ON CONFLICT (item) DO UPDATE SET price = excluded.price, version = excluded.version"""


def price(transaction: Transaction) -> dict[str, Any]:
    return {**transaction.payload, "version": transaction.metadata["sequence"]}


class GoesBackInTime(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(UPSERT, price(transaction))


class LooksAtTheVersion(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(UPSERT + " WHERE prices.version < excluded.version", price(transaction))


class DeclaresItsOrder(GoesBackInTime):
    contract = contract(sequencing="latest-wins")


class DeclaresStrictOrder(GoesBackInTime):
    contract = contract(sequencing="strict")


# ── state on self ───────────────────────────────────────────────────────────────────────────────────────


class Remembers(ConsumerTask):
    """Skips events it has seen, even if they were rolled back."""

    contract = contract()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: set[str] = set()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        if transaction.id in self.seen:
            return
        self.seen.add(transaction.id)
        session.execute(INSERT, values(transaction))


# ── an outside call without the ledger ──────────────────────────────────────────────────────────────────


class CallsOutside(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))
        with OUTSIDE.open("a") as file:
            file.write(transaction.id)


class SendsADatagram(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
            outside.sendto(b"an order came", ("127.0.0.1", 9))


class StartsAProcess(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))
        subprocess.run(["true"], check=True)


class CallsAService(ConsumerTask):
    """The service is a fake that opens nothing, so `outside` must name it."""

    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        self.services["cards"].charge(transaction.payload["total"], transaction.id)
        session.execute(INSERT, values(transaction))


class CallsThroughTheLedger(ConsumerTask):
    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        total = transaction.payload["total"]
        session.effect("charge", lambda key: self.services["cards"].charge(total, key))
        session.execute(INSERT, values(transaction))


class Cards:
    """A provider that honors keys and keeps its books in the scenario's database, where they are compared."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def charge(self, total: int, key: str) -> str:
        with self._engine.begin() as connection:
            charged = text("INSERT INTO charges VALUES (:key, :total) ON CONFLICT DO NOTHING")
            connection.execute(charged, {"key": key, "total": total})
        return key


# ── hanging ─────────────────────────────────────────────────────────────────────────────────────────────


class Hangs(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))
        wait_forever()


def wait_forever() -> None:
    import threading

    threading.Event().wait()


class HangsInC(ConsumerTask):
    """Hangs in code that holds the GIL: no other Python thread gets to run."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        match_forever()


def match_forever() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


class HangsAwaiting(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute(INSERT, values(transaction))
        await await_forever()


async def await_forever() -> None:
    import asyncio

    await asyncio.get_running_loop().create_future()
