"""Workers that consume a queue, with an inbox in three ways: the real engine, connector, inbox and sessions.

What must hold: every message ends once, as done or as a dead letter; an effect is once, committed together with its
record, and before the message is acknowledged; a delivery that was overtaken changes nothing; a worker that is well
keeps what it holds.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from datetime import UTC, datetime, timedelta
from functools import cache
from inspect import isawaitable
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from onceward import AsyncConsumerTask, ExceptionCategory, Transaction, TransactionException
from onceward._nats.connection import NatsUnavailable
from onceward.connectors.lease_rules import LeaseRules
from onceward.inbox import AsyncInbox, Contract, Inbox
from onceward.task.mixins.policies import ConsumerPolicy
from tests.simulation.database import SimulatedDatabase
from tests.simulation.loop import START, Process
from tests.simulation.simulation import Program, SimulatedClock, Simulation, template_folder
from tests.simulation.sources.file import FileSource, empty_queue
from tests.simulation.sources.source import Source
from tests.simulation.wire import WireLost

LEASE = 30.0
RULES = LeaseRules(lease=LEASE, max_deliveries=1000)
OUTAGES = (WireLost, NatsUnavailable, RedisError, OperationalError)
"""What a producer tries again after."""
CREATED = datetime.fromtimestamp(START, UTC)


class Provider:
    """The outside world. It honors keys."""

    def __init__(self) -> None:
        self.charges: dict[str, str] = {}

    def charge(self, key: str, what: str) -> str:
        self.charges.setdefault(key, what)
        return f"receipt-{key}"


class Billing(AsyncConsumerTask):
    def __init__(self, world: ConsumerWorld, process: Process, **parts: Any) -> None:
        super().__init__(**parts)
        self.clock = SimulatedClock(world.loop)
        self.contract = world.contract
        self._world = world
        self._process = process

    async def process_transaction(self, transaction: Transaction, /, *session: Any, **_: Any) -> None:
        await self._world.handle(self._process, transaction, session, asyncio.sleep)


class ConsumerWorld(Simulation):
    services = ("queue", "database")

    def set_up(self, folder: Path) -> None:
        random = self.random
        self.kind = self.faults.are_kind_to_leases()
        self.workers = random.choice((2, 3))
        self.mode = random.choice(("transactional", "effectful", "effectful", "plain"))
        self.contract = None if self.mode == "plain" else contract(self.mode)
        self.policy = ConsumerPolicy.model_validate(
            {
                "loop": {
                    "streaming": True,
                    "mode": random.choice(("batch", "continuous")),
                    "batch": {"size": random.choice((1, 2, 5))},
                    "concurrency": {"value": random.choice((1, 1, 2))},
                    "empty_queue": {"backoff": 0.5, "backoff_cap": 4.0},
                },
                "steps": {
                    "process": {"retry": {"max_attempts": random.choice((1, 2)), "backoff": 0.5}},
                    "fetch": {"retry": {"max_attempts": 2, "backoff": 0.5}},
                },
            }
        )
        shutil.copy(self.prepared(template, self.mode), folder / "inbox.db")
        self.database = SimulatedDatabase(folder / "inbox.db", self.wire, self._committed)
        self.view = sqlite3.connect(folder / "inbox.db", isolation_level=None)
        self.provider = Provider()
        self.sent: Counter[str] = Counter()
        self.plans: dict[str, str] = {}
        """How each message fails."""
        self.visits: Counter[str] = Counter()
        self.newest: Counter[str] = Counter()
        """The highest token of a start that reached its effect, by event."""
        self.handled: set[tuple[str, str]] = set()
        self.holders: dict[Hashable, tuple[Any, Process]] = {}
        self.ends: dict[Hashable, str] = {}
        self._seen = 0
        self.source = self.make_source(folder)
        self.history.note("root", "mode %s, policy %s", self.mode, self.policy.loop)

    def make_source(self, folder: Path) -> Source:
        return self.file_source(folder)

    def file_source(self, folder: Path) -> Source:
        shutil.copy(self.prepared(empty_queue), folder / "queue.db")
        return FileSource(folder / "queue.db", self.wire, self, RULES)

    def programs(self) -> dict[str, Program]:
        return dict.fromkeys(("anna", "ben", "carl"), self._work)

    async def _work(self, process: Process) -> None:
        queue = self.source.open(process)
        services = {}
        if self.contract is not None:
            services["inbox"] = AsyncInbox(self.database.engine(), clock=process.clock)
        task = Billing(self, process, connectors={"source": queue}, services=services)
        while True:
            try:
                await task.consume_transactions(self.policy)
            except Exception as error:
                self.history.note(process, "its loop ends: %s: %.200s", type(error).__name__, error)
            await asyncio.sleep(1.0)

    async def handle(self, process: Process, transaction: Transaction, session: Any, sleep: Any) -> None:
        """The handler, in asyncio or a simulated thread."""
        id_ = transaction.id
        self.history.note(process, "begins %s", id_)
        plan: dict[str, Any] = transaction.payload
        await ended(sleep(plan["before"]))
        self.visits[id_] += 1
        if plan["fails"] == "always":
            raise TransactionException("refused", category=ExceptionCategory.BUSINESS)
        if plan["fails"] == "at first" and self.visits[id_] < 3:
            raise ValueError("broken")
        if self.mode == "effectful":
            await ended(session[0].effect("charge", lambda key: self.charging(process, key, id_)))
        token = int(session[0].event.lock_token or 0) if session else 0
        self.newest[id_] = max(self.newest[id_], token)
        if session:
            row = {"id": id_, "token": token, "process": process.name}
            await ended(session[0].execute("INSERT INTO effects VALUES (:id, :token, :process)", row))
        await ended(sleep(plan["after"]))
        self.history.note(process, "has handled %s", id_)
        self.handled.add((process.name, id_))

    def charging(self, process: Process, key: str, what: str) -> Any:
        return self.charge(process, key, what)

    async def charge(self, process: Process, key: str, what: str) -> str:
        unlucky = self.trouble and self.random.random() < self.faults.refused
        if unlucky and self.random.random() < 0.5:
            self.wire.lose(process, "provider", f"charge {what}", "never arrived")
        receipt = await self.wire.call(
            process, "provider", f"charge {what}", lambda: self.provider.charge(key, what)
        )
        if unlucky:
            self.wire.lose(process, "provider", f"charge {what}", "was done, but the reply was lost")
        self.history.note(process, "has charged %s", what)
        return receipt

    async def use(self) -> None:
        random = self.random
        queue = self.source.open(self.root)
        for number in range(random.choice((1, 2, 4))):
            plan = {
                "before": random.choice(
                    (0.0, 0.0, 0.5, 2.0, 2 * LEASE if self.mode != "transactional" else 4.0)
                ),
                "after": random.choice((0.0, 0.0, 0.5, 2.0)),
                "fails": random.choice(("never", "never", "never", "at first", "always")),
            }
            copies = random.choice((1, 1, 2))
            self.plans[f"m{number}"] = plan["fails"]
            for _ in range(copies if self.mode != "plain" else 1):
                made = CREATED - timedelta(days=random.choice((0, 0, 1)))
                message = Transaction(
                    id=f"m{number}", payload=plan, created_at=made, metadata={"event_type": "paid"}
                )
                self.sent[message.id] += 1
                while True:
                    try:
                        await queue.dispatch_transactions_async([message])
                        break
                    except OUTAGES:
                        await asyncio.sleep(0.5)
            await asyncio.sleep(random.choice((0.0, 0.0, 1.0, 5.0)))

    def troubles(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [*super().troubles(), self.source.fail]

    def calm_down(self) -> None:
        super().calm_down()
        self.source.calm_down()

    # ── what is seen ────────────────────────────────────────────────────────────────────────────────────

    def delivered(self, process: Process, key: Hashable, token: Any) -> None:
        self.history.note(process, "gets message %s", key)
        known = self.holders.get(key)
        if known is not None and known[1].alive and self.kind:
            self.accuse(
                f"{process} gets message {key}, which {known[1]} has, and nothing is wrong with that one"
            )
        self.holders[key] = (token, process)

    def ended(self, process: Process, key: Hashable, token: Any, how: str, id_: str | None) -> None:
        self.history.note(process, "message %s is %s", key, how)
        known = self.holders.pop(key, None)
        if known is None or known[0] != token:
            self.accuse(f"{process} ended message {key} as {how}, which is no longer its own")
        if how in ("done", "buried"):
            if key in self.ends and self.source.has_unique_keys:
                self.accuse(f"message {key} ends as {how}, but it ended as {self.ends[key]}")
            self.ends[key] = how
        if how == "done":
            self._check_done(process, id_)

    def _check_done(self, process: Process, id_: str | None) -> None:
        if self.mode == "plain":
            if (process.name, id_) not in self.handled:
                self.accuse(f"{id_} was acknowledged by {process}, which has not handled it")
        elif not self.view.execute("SELECT 1 FROM effects WHERE id = ?", (id_,)).fetchone():
            self.accuse(f"{id_} was acknowledged before its effect was committed")

    def _committed(self, process: Process) -> None:
        rows = self.view.execute(
            "SELECT rowid, id, token FROM effects WHERE rowid > ?", (self._seen,)
        ).fetchall()
        for self._seen, id_, token in rows:
            self.history.note(process, "has committed %s", id_)
            [[count]] = self.view.execute("SELECT count(*) FROM effects WHERE id = ?", (id_,)).fetchall()
            if count > 1:
                self.accuse(f"{id_} has {count} effects")
            if self.mode == "effectful" and token < self.newest[id_]:
                self.accuse(f"{id_} was committed by start {token}, though start {self.newest[id_]} has it")
        done = {id_ for (id_,) in self.view.execute("SELECT tracking_id FROM onceward_dedup")}
        effects = {id_ for (id_,) in self.view.execute("SELECT id FROM effects")}
        if done != effects:
            self.accuse(f"recorded as done, but no effect, or the reverse: {sorted(done ^ effects)}")
        if self.mode == "effectful" and not done <= set(self.provider.charges.values()):
            self.accuse("recorded as done, but never charged")

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────

    def is_over(self) -> bool:
        return not self.source.left()

    def check(self) -> None:
        if left := self.source.left():
            self.accuse(f"messages without an end: {left}")
        appended, done, dead = self.source.totals()
        if appended != done + dead:
            self.accuse(f"{appended} messages were sent, {done} done and {dead} buried")
        buried, lost = self.source.buried(), self.source.lost()
        effects = Counter(id_ for (id_,) in self.view.execute("SELECT id FROM effects").fetchall())
        charges = Counter(self.provider.charges.values())
        for id_ in self.sent:
            if self.mode == "plain":
                continue
            if effects[id_] > 1 or charges[id_] > 1:
                self.accuse(f"{id_} has {effects[id_]} effects and {charges[id_]} charges")
            if buried[id_] and self.plans[id_] != "always" and not self.faults.are_deadly():
                self.accuse(f"{id_} is a dead letter, though nothing is wrong with it")
            if bool(effects[id_]) == bool(buried[id_]) and id_ not in lost:
                self.accuse(f"{id_} has {effects[id_]} effects and {buried[id_]} dead letters")
            if self.mode == "effectful" and effects[id_] and not charges[id_]:
                self.accuse(f"{id_} was never charged")

    def close(self) -> None:
        for name in ("view", "source"):
            if name in self.__dict__:
                self.__dict__[name].close()


async def ended(result: Any) -> Any:
    """What a call in asyncio or in a thread returns in the end."""
    return await result if isawaitable(result) else result


def contract(mode: Any) -> Contract:
    return Contract(
        consumer_id="billing",
        event_types=["paid"],
        owner_team="tests",
        idempotency_mechanism="record and effect in one transaction",
        mode=mode,
        lease=LEASE,
        poison_after=3,
    )


@cache
def template(mode: str) -> Path:
    """An empty inbox to copy: making it takes longer than most runs."""
    path = template_folder(mode) / "inbox.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        connection.exec_driver_sql("CREATE TABLE effects (id TEXT, token INTEGER, process TEXT)")
    inbox = Inbox(engine, clock=lambda: START)
    inbox.migrate()
    if mode != "plain":
        inbox.register(contract(mode))
    engine.dispose()
    return path
