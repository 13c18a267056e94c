"""A real consumer process for the inbox crash tests, which dies or waits where its orders say.

The product knows nothing of these points: the process patches its own copy of the code, in `arm`. What it does is
written to files that outlive it: the journal says which handlers ran, the provider's file which events were charged.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.connectors import AsyncSqliteConnector, SqliteConnector
from onceward.connectors.postgresql import AsyncPostgreSqlConnector, PostgreSqlConnector
from onceward.db.engines import connect_arguments
from onceward.inbox import NOT_DONE, AsyncInbox, Contract, Done, Inbox
from onceward.inbox.attempts import AttemptLedger
from onceward.inbox.commits.group import CommitGroup
from onceward.inbox.effects import Heartbeat, Ledger
from onceward.inbox.processor import EventProcessor
from onceward.inbox.stores.postgresql import PostgreSqlStore
from onceward.inbox.stores.sqlite import SqliteStore
from onceward.task.groups import pace, together
from onceward.task.mixins.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    EmptyQueuePolicy,
    FetchPolicy,
    RetryPolicy,
)
from onceward.transaction import Settlement, Verdict

TARGET = "the-one"
"""The event that it happens to."""

DEBIT = "INSERT INTO debits (id, worker) VALUES (:id, :worker)"
CREDIT = "INSERT INTO credits (id, worker) VALUES (:id, :worker)"
DONE = "SELECT count(*) FROM credits WHERE id = :id"


@dataclass(frozen=True)
class Orders:
    """The orders of a worker."""

    folder: Path
    url: str
    connect_args: dict[str, Any] = field(default_factory=dict)
    name: str = "worker"
    queue: str = "queue.db"
    joint: bool = False
    """Its queue is in the database of the inbox."""
    consumer: str = "billing"
    mode: Any = "transactional"
    asynchronous: bool = False
    point: str = ""
    """The point where it happens to the target: see `arm` and the handlers."""
    waits: bool = False
    """At that point it waits for the file `go` instead of killing itself."""
    waits_to_begin: bool = False
    key_valid_for: timedelta | None = None
    continuous: bool = False
    keyed: bool = True
    """The provider honors keys; if not, `reconcile` asks it."""
    lease: float = 30.0
    """The lease of contract and source."""
    heartless: bool = False
    """It never renews the contract's lease."""
    poison_after: int = 3
    max_deliveries: int = 5
    batch: int = 10
    slots: int = 1
    takes: float = 0.0
    """Seconds in each handler: in the outside call, or, without one, between the writes."""
    skew: float = 0.0
    """Seconds by which its clock is wrong."""
    commit: Any = None
    """Of its consumer: "group", or what is usual."""
    checked: bool = False
    """Check at each acknowledgement whether others can see the effect."""


def contract_of(orders: Orders) -> Contract:
    return Contract(
        consumer_id=orders.consumer,
        event_types=["*"],
        owner_team="tests",
        idempotency_mechanism="dedup row, debit and credit in one transaction",
        mode=orders.mode,
        lease=orders.lease,
        poison_after=orders.poison_after,
    )


class Provider:
    """The outside world. A charge is on disk when `charge` returns."""

    def __init__(self, path: Path, keyed: bool) -> None:
        self._path = path
        self._keyed = keyed

    def charge(self, key: str, what: str) -> str:
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if self._keyed and any(line.split()[0] == key for line in file):
                return f"receipt-{key}"
            file.write(f"{key} {what}\n")
            file.flush()
            os.fsync(file.fileno())
        return f"receipt-{key}"

    def was_charged(self, key: str) -> bool:
        return self._path.exists() and any(
            line.split()[0] == key for line in self._path.read_text().splitlines()
        )


class Worker:
    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.provider = Provider(orders.folder / "provider", orders.keyed)
        self._go = orders.folder / "go"

    def say(self, word: str, about: str = "") -> None:
        """Write one line of the journal, completely or not at all."""
        line = f"{self.orders.name} {word} {about}\n".encode()
        journal = os.open(self.orders.folder / "journal", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(journal, line)
        os.close(journal)

    def reached(self, point: str, tracking_id: str) -> None:
        if point != self.orders.point or tracking_id != TARGET:
            return
        self.say("reached", point)
        if self.orders.waits:
            self.wait()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self) -> None:
        while not self._go.exists():
            time.sleep(0.01)

    # ── what both handlers share ────────────────────────────────────────────────────────────────────────

    def values(self, tracking_id: str) -> dict[str, str]:
        return {"id": tracking_id, "worker": self.orders.name}

    def charge(self, key: str, tracking_id: str) -> str:
        self.reached("calling", tracking_id)
        time.sleep(self.orders.takes)
        self.say("charging", tracking_id)
        receipt = self.provider.charge(key, tracking_id)
        self.reached("called", tracking_id)
        return receipt

    def reconcile(self, key: str) -> Any:
        self.say("reconciling", key)
        return Done(f"receipt-{key}") if self.provider.was_charged(key) else NOT_DONE


class Billing(ConsumerTask):
    def __init__(self, worker: Worker, **given: Any) -> None:
        super().__init__(**given)
        self.worker = worker
        self.contract = contract_of(worker.orders)
        self.commit = worker.orders.commit

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        worker, orders, id_ = self.worker, self.worker.orders, transaction.id
        worker.say("handling", id_)
        if orders.mode == "effectful":
            reconcile = None if orders.keyed else worker.reconcile
            session.effect(
                "charge",
                lambda key: worker.charge(key, id_),
                reconcile=reconcile,
                key_valid_for=orders.key_valid_for,
            )
        session.execute(DEBIT, worker.values(id_))
        worker.reached("writing", id_)
        if orders.mode == "transactional":
            time.sleep(orders.takes)
        session.execute(CREDIT, worker.values(id_))
        worker.reached("written", id_)


class AsyncBilling(AsyncConsumerTask):
    def __init__(self, worker: Worker, **given: Any) -> None:
        super().__init__(**given)
        self.worker = worker
        self.contract = contract_of(worker.orders)
        self.commit = worker.orders.commit

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:
        worker, orders, id_ = self.worker, self.worker.orders, transaction.id
        worker.say("handling", id_)

        async def charge(key: str) -> str:
            return worker.charge(key, id_)

        async def reconcile(key: str) -> Any:
            return worker.reconcile(key)

        if orders.mode == "effectful":
            await session.effect("charge", charge, reconcile=None if orders.keyed else reconcile)
        await session.execute(DEBIT, worker.values(id_))
        worker.reached("writing", id_)
        await session.execute(CREDIT, worker.values(id_))
        worker.reached("written", id_)


class CheckedConnector(SqliteConnector):
    """Report an acknowledgement whose effect others cannot see yet."""

    worker: Worker
    database: Any

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        with self.database.connect() as connection:
            for settlement in settlements:
                id_ = settlement.transaction.id
                if settlement.verdict is Verdict.DONE and connection.scalar(text(DONE), {"id": id_}) != 1:
                    self.worker.say("acknowledged-too-early", id_)
        super().settle_transactions(settlements)


# ── where it dies ───────────────────────────────────────────────────────────────────────────────────────


def arm(worker: Worker) -> None:
    """The points in the inbox; those in the handlers are `calling`, `called`, `writing` and `written`."""
    reached = worker.reached

    def fetched(self: Any, batch: Sequence[Transaction], *_: Any) -> None:
        for transaction in batch:
            reached("fetched", transaction.id)

    def all_removed(self: Any, answer: Any, transaction: Any, delivered: Sequence[Transaction]) -> None:
        for each in delivered:
            reached("removed", each.id)

    def batch_started(self: Any, answer: dict[str, Any], *_: Any) -> None:
        for tracking_id in answer:
            reached("started", tracking_id)

    def started(self: Any, answer: Any, contract: Any, key: Any, *_: Any) -> None:
        if answer is not None:
            reached("started", key.tracking_id)

    def admitted(self: Any, answer: bool, transaction: Any, key: Any, digest: Any) -> None:
        reached("admitted", key.tracking_id)

    def admitted_in_group(
        self: Any, answer: Any, attempt: Any, session: Any, *, letters: bool = True
    ) -> None:
        if not letters:
            reached("admitted", attempt.key.tracking_id)

    def ended(point: str) -> Callable[..., None]:
        return lambda self, answer, attempt, *_: reached(point, attempt.key.tracking_id)

    if worker.orders.commit == "group":  # however slow the machine is
        together.LONGEST = pace.QUICK = 1000.0
    if worker.orders.heartless:
        Heartbeat._renew = does_nothing  # type: ignore[assignment]
    for connector in (SqliteConnector, PostgreSqlConnector):
        after_plain(connector, "fetch_transactions", fetched)
        after_plain(connector, "settle_in", lambda *about: reached("removed", about[3].id))
    after_plain(PostgreSqlConnector, "settle_all_in", all_removed)
    for connector in (AsyncSqliteConnector, AsyncPostgreSqlConnector):
        after(connector, "fetch_transactions_async", fetched)
    after(AttemptLedger, "expect", batch_started)
    after(AttemptLedger, "start", started)
    after(Ledger, "_intend", lambda self, *_: reached("intended", self._claim.key.tracking_id))
    after(Ledger, "_settle", lambda self, *_: reached("settled", self._claim.key.tracking_id))
    after(EventProcessor, "_handle", ended("before-commit"))
    after(EventProcessor, "_transactional", ended("committed"))

    def group_committed(group: Any, *_: Any) -> None:
        for attempt, _result in group._kept:
            reached("committed", attempt.key.tracking_id)

    after(CommitGroup, "_commit", group_committed)
    after_plain(
        EventProcessor, "_complete", lambda *about: reached("before-commit", about[3].key.tracking_id)
    )
    after(EventProcessor, "_effectful", ended("committed"))
    for store in (PostgreSqlStore, SqliteStore):
        after_plain(store, "admit", admitted)
    after(EventProcessor, "admit", admitted_in_group)


async def does_nothing(*_: Any) -> None: ...


def after(cls: Any, name: str, hook: Callable[..., None]) -> None:
    real = getattr(cls, name)

    async def around(self: Any, *args: Any, **named: Any) -> Any:
        answer = await real(self, *args, **named)
        hook(self, answer, *args, **named)
        return answer

    setattr(cls, name, around)


def after_plain(cls: Any, name: str, hook: Callable[..., None]) -> None:
    real = getattr(cls, name)

    def around(self: Any, *args: Any, **named: Any) -> Any:
        answer = real(self, *args, **named)
        hook(self, answer, *args)
        return answer

    setattr(cls, name, around)


# ── running ─────────────────────────────────────────────────────────────────────────────────────────────


def work(orders: Orders) -> None:
    """Consume until SIGTERM, which waits until the worker can be stopped by it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    logging.basicConfig(filename=orders.folder / f"{orders.name}.log", level=logging.INFO)
    worker = Worker(orders)
    arm(worker)
    if orders.waits_to_begin:
        worker.wait()
    if orders.asynchronous:
        asyncio.run(consume_async(worker))
    else:
        consume(worker)


def consume(worker: Worker) -> None:
    orders = worker.orders
    true_time = time.time
    if orders.skew:
        time.time = lambda: true_time() + orders.skew
    engine = create_engine(orders.url, connect_args=orders.connect_args)
    # The source's clock is right: only the inbox's is wrong.
    source = source_of(orders, clock=true_time)
    if isinstance(source, CheckedConnector):
        source.worker, source.database = worker, engine
    inbox = Inbox(engine, clock=time.time)
    task = Billing(worker, connectors={"source": source}, services={"inbox": inbox})

    def leave(*_: Any) -> None:
        task.stop()
        worker.say("stopping")

    signal.signal(signal.SIGTERM, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    worker.say("ready", "-")
    tell(worker, task.consume_transactions(policy_of(orders)))


def source_of(orders: Orders, **clock: Any) -> Any:
    rules: Any = {"lease": orders.lease, "max_deliveries": orders.max_deliveries, "redelivery_delay": 0.1}
    if orders.joint:
        return joint_queue(orders.url, orders.connect_args, asynchronous=orders.asynchronous, **rules)
    if orders.asynchronous:
        return AsyncSqliteConnector(orders.folder / orders.queue, **rules)
    connector = CheckedConnector if orders.checked else SqliteConnector
    return connector(orders.folder / orders.queue, **rules, **clock)


def joint_queue(url: str, connect_args: dict[str, Any], *, asynchronous: bool, **rules: Any) -> Any:
    """A connector to the queue that is in the database of the inbox."""
    database = make_url(url)
    if database.get_backend_name() == "sqlite":
        in_file: Any = AsyncSqliteConnector if asynchronous else SqliteConnector
        return in_file(database.database, queue="orders", **rules)
    kind: Any = AsyncPostgreSqlConnector if asynchronous else PostgreSqlConnector
    return kind(database.update_query_dict(connect_args), "orders", **rules)


async def consume_async(worker: Worker) -> None:
    orders = worker.orders
    url = make_url(orders.url.replace("sqlite://", "sqlite+aiosqlite://", 1))
    engine = create_async_engine(url, connect_args={**connect_arguments(url), **orders.connect_args})
    source = source_of(orders)
    task = AsyncBilling(worker, connectors={"source": source}, services={"inbox": AsyncInbox(engine)})
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    worker.say("ready", "-")
    tell(worker, await task.consume_transactions(policy_of(orders)))
    await engine.dispose()
    await source.close_async()


def tell(worker: Worker, report: Any) -> None:
    numbers = {
        name: getattr(report, name)
        for name in ("succeeded", "duplicates", "failed", "postponed", "unstarted")
    }
    worker.say("report", json.dumps(numbers, separators=(",", ":")))


def policy_of(orders: Orders) -> ConsumerPolicy:
    return ConsumerPolicy(
        loop=ConsumerLoopPolicy(
            mode="continuous" if orders.continuous else "batch",
            batch=BatchPolicy(size=orders.batch),
            concurrency=ConcurrencyPolicy(value=orders.slots),
            streaming=True,
            empty_queue=EmptyQueuePolicy(backoff=0.02, backoff_cap=0.05),
        ),
        # Retry while the database is away; see `DatabaseUnavailableError`.
        steps=ConsumerSteps(fetch=FetchPolicy(retry=RetryPolicy(max_attempts=200, backoff=0.2))),
    )


def write_for_ever(orders: Orders, own: str) -> None:
    """New events without end, and without an engine."""
    worker = Worker(orders)
    inbox = Inbox(create_engine(orders.url, connect_args=orders.connect_args))
    contract = contract_of(orders)

    def handle(event: Any, session: Any) -> None:
        session.execute(DEBIT, worker.values(event.tracking_id))
        session.execute(CREDIT, worker.values(event.tracking_id))

    number = 0
    while True:
        number += 1
        inbox.process(contract, Transaction(id=f"{own}-{number}", payload=number), handle)
