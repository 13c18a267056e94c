"""Producers that write into an outbox, and relays that publish from it: the real rows, relay and engine, in threads.

What must hold: a message that was committed arrives, or is a dead letter because its sink refused it; one that was
rolled back never arrives; nothing counts as published that has not arrived; of a key, none arrives before an earlier
one; a relay whose claim was overtaken changes nothing; and a message that commits late is not skipped.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from onceward import ConsumerTask, ExceptionCategory, Transaction, TransactionException
from onceward.backoff import Backoff
from onceward.inbox import Inbox
from onceward.outbox.claims import OutboxRows
from onceward.outbox.connections import async_port
from onceward.outbox.message import message
from onceward.outbox.relay import Relay, RelayRules
from onceward.outbox.rows import write
from onceward.task.mixins.policies import ConsumerPolicy
from tests.simulation.database import SimulatedDatabase
from tests.simulation.loop import START, Process
from tests.simulation.news import SimulatedDoorbell, SimulatedNews
from tests.simulation.simulation import Program, SimulatedClock, Simulation, template_folder
from tests.simulation.threads import SimulatedThread, block
from tests.simulation.wire import WireLost

RULES = RelayRules(backoff=Backoff(0.5, cap=2.0), most_failures=50, most_lost=1000)
TARGETS = ("memory://near", "memory://far")
ENDED = ("published", "dead")


class SeenRow(NamedTuple):
    """A row of the outbox, as it was last committed."""

    state: str
    key: str | None = None
    token: int | None = None
    lost: int = 0


NOT_SEEN = SeenRow("")


class RelayTask(ConsumerTask):
    def __init__(self, world: RelayWorld, relay: Relay) -> None:
        super().__init__({"source": relay})
        self.clock = SimulatedClock(world.loop)
        self._relay = relay

    def process_transaction(self, transaction: Transaction, /, **_: Any) -> None:
        self._relay.publish(transaction)


class SimulatedSink:
    """What a relay opens for a target. In its place in the world, messages arrive."""

    def __init__(self, world: RelayWorld, process: Process, target: str) -> None:
        self._world = world
        self._process = process
        self._target = target

    def open(self, *, asynchronous: bool) -> SimulatedSink:
        return self

    def dispatch_transactions(self, transactions: Sequence[Transaction]) -> None:
        world, process = self._world, self._process
        if world.slowness:
            block(asyncio.sleep(world.slowness))
        try:
            block(world.wire.call(process, "sink", "dispatch", lambda: self._take(transactions)))
        except WireLost as lost:
            raise ConnectionError(str(lost)) from None

    def _take(self, transactions: Sequence[Transaction]) -> None:
        """All or none."""
        for each in transactions:
            self._world.refuse_perhaps(each)
        for each in transactions:
            self._world.arrived(self._process, each.id)

    def close(self) -> None:
        return


class RelayWorld(Simulation):
    services = ("database", "sink")
    in_threads = True
    patience = 800.0

    def set_up(self, folder: Path) -> None:
        random = self.random
        faults = self.faults
        faults.delay = min(faults.delay, 0.05)
        self.calm = faults.are_kind_to_leases() and not (faults.kills or faults.crash)
        self.lease = random.choice((4.0, 10.0))
        self.policy = ConsumerPolicy.model_validate(
            {
                "loop": {
                    "streaming": True,
                    "mode": random.choice(("batch", "continuous")),
                    "batch": {"size": random.choice((1, 2))},
                    "concurrency": {"value": random.choice((1, 2))},
                    "empty_queue": {"backoff": 0.5, "backoff_cap": 2.0},
                },
                "steps": {"fetch": {"retry": {"max_attempts": 2, "backoff": 0.5}}},
            }
        )
        shutil.copy(self.prepared(template), folder / "shop.db")
        self.database = SimulatedDatabase(folder / "shop.db", self.wire, self._committed)
        self.view = sqlite3.connect(folder / "shop.db", isolation_level=None)
        self.producers = random.choice((1, 2, 3))
        self.left = self.producers
        self.rows: dict[str, SeenRow] = {}
        """Messages that are committed."""
        self.holders: dict[str, Process] = {}
        """Who has last claimed a message, or ended its claim."""
        self.places: dict[str, int] = {}
        """The place of each message in the order of its key."""
        self.arrivals: Counter[str] = Counter()
        self.refusals: dict[str, int] = {}
        """How often the sink will refuse a message."""
        self.slowness = random.choice((0.0, 0.0, 0.0, 2.5 * self.lease))
        """Seconds that the sink takes."""
        self.hears = random.random() < 0.5
        """Whether relays hear of every commit, as with LISTEN, or only of some."""
        self.news: dict[Process, SimulatedNews] = {}
        self._numbers = 0

    def programs(self) -> dict[str, Program]:
        return dict.fromkeys(("anna", "ben"), self._relay)

    async def _relay(self, process: Process) -> None:
        thread = SimulatedThread(target=self._relay_in_thread, args=(process,))
        thread.start()
        await thread.ended()

    def _relay_in_thread(self, process: Process) -> None:
        engine = self.database.blocking_engine()
        news = self.news[process] = SimulatedNews(hears=self.hears)
        with patch.multiple("onceward.outbox.relay", news_of=lambda _: news, Doorbell=SimulatedDoorbell):
            relay = Relay(engine, lambda target: self.sink(process, target), lease=self.lease, rules=RULES)
        relay._rows = OutboxRows(engine, clock=lambda: START + self.loop.time())
        task = RelayTask(self, relay)
        while True:
            try:
                task.consume_transactions(self.policy)
            except Exception as error:
                self.history.note(process, "its loop ends: %s: %.200s", type(error).__name__, error)
            block(asyncio.sleep(1.0))

    def sink(self, process: Process, target: str) -> Any:
        return SimulatedSink(self, process, target)

    # ── producers ───────────────────────────────────────────────────────────────────────────────────────

    async def use(self) -> None:
        await asyncio.gather(*(self._produce(number) for number in range(self.producers)))

    async def _produce(self, number: int) -> None:
        random, key = self.random, self.random.choice((f"key{number}", f"key{number}", None))
        target = random.choice(TARGETS)
        for place in range(random.choice((1, 3, 6))):
            id_ = f"p{number}m{place}"
            if random.random() < 0.15:
                await self._send(target, f"{id_}x", key, commits=False)
            self.refusals[id_] = random.choice((0, 0, 0, 1, 10_000))
            if key is not None:
                self.places[id_] = place
            await self._send(target, id_, key, commits=True)
            await asyncio.sleep(random.choice((0.0, 0.0, 0.5, 4.0)))
        self.left -= 1

    async def _send(self, target: str, id_: str, key: str | None, *, commits: bool) -> None:
        """Send until it is certain. Its number is drawn when it is written, as PostgreSQL does, and the commit may come
        much later."""
        made = message(target, {}, id=id_, key=key, delay=None, at=None, headers=None)
        self._numbers += 1
        number = self._numbers
        await asyncio.sleep(self.random.choice((0.0, 0.0, 0.0, 2.0)))
        engine = self.database.engine()
        while True:
            try:
                async with engine.connect() as connection:
                    await connection.exec_driver_sql("BEGIN IMMEDIATE")
                    await connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": id_})
                    await write(await async_port(connection), made)
                    await connection.execute(_RENUMBER, {"number": number, "id": id_})
                    if commits:
                        await connection.commit()
                    else:
                        await connection.rollback()
                return
            except OperationalError as error:
                self.history.note("root", "could not send %s: %.100s", id_, error)
                await asyncio.sleep(0.5)

    # ── what is seen ────────────────────────────────────────────────────────────────────────────────────

    def refuse_perhaps(self, each: Transaction) -> None:
        left = self.refusals.get(each.id, 0)
        if left > 1:
            raise TransactionException("refused", category=ExceptionCategory.BUSINESS)
        if left:
            self.refusals[each.id] = 0
            raise ValueError("not now")

    def arrived(self, process: Process, id_: str) -> None:
        self.history.note(process, "%s arrives", id_)
        key = self.rows.get(id_, NOT_SEEN).key
        if id_ not in self.rows:
            self.accuse(f"{id_} arrives, but was never committed")
        self.arrivals[id_] += 1
        if self.calm and self.arrivals[id_] > 1:
            self.accuse(f"{id_} arrives {self.arrivals[id_]} times, though nothing went wrong")
        if key is None or self.arrivals[id_] > 1:
            return
        for other, row in self.rows.items():
            is_earlier = row.key == key and self.places[other] < self.places[id_]
            if is_earlier and not self.arrivals[other] and row.state != "dead":
                self.accuse(f"{id_} arrives before {other}, which has the same key")

    def _committed(self, process: Process) -> None:
        found = self.view.execute(
            "SELECT message_id, state, key, token, lost FROM onceward_outbox"
        ).fetchall()
        if any(id_ not in self.rows for id_, *_ in found):
            self._tell()
        for id_, *values in found:
            row, before = SeenRow(*values), self.rows.get(id_, NOT_SEEN)
            if row.token != before.token:
                if before.token and row.lost == before.lost and self.holders[id_] is not process:
                    self.accuse(f"{process} changed {id_}, which {self.holders[id_]} has claimed")
                self.holders[id_] = process
            if row.state != before.state:
                self._changed(process, id_, before.state, row.state)
            self.rows[id_] = row
        if len(found) < len(self.rows):
            self.accuse(f"messages are gone: {self.rows.keys() - {id_ for id_, *_ in found}}")

    def _tell(self) -> None:
        """Wake relays: something was sent."""
        for each in self.news.values():
            if self.hears or self.random.random() < 0.5:
                each.bell.wake()

    def _changed(self, process: Process, id_: str, before: str, state: str) -> None:
        self.history.note(process, "%s is %s", id_, state)
        if before in ENDED:
            self.accuse(f"{process} made {id_} {state}, which was {before}")
        if state == "published" and not self.arrivals[id_]:
            self.accuse(f"{id_} counts as published, but has not arrived")
        if state == "dead" and self.refusals[id_] < 2:
            self.accuse(f"{id_} is a dead letter, but nobody refused it")

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────

    def is_over(self) -> bool:
        return self.left == 0 and all(each.state in ENDED for each in self.rows.values())

    def check(self) -> None:
        waiting = {id_: each.state for id_, each in self.rows.items() if each.state not in ENDED}
        if waiting or self.left:
            self.accuse(f"messages that were neither published nor refused: {waiting}")
        lost = [id_ for id_ in self.refusals if id_ not in self.rows]
        if lost:
            self.accuse(f"messages that were sent but are not in the outbox: {lost}")

    def close(self) -> None:
        if "view" in self.__dict__:
            self.view.close()


_RENUMBER = text("UPDATE onceward_outbox SET seq = :number WHERE message_id = :id AND attempts = 0")


@cache
def template() -> Path:
    """An empty outbox to copy."""
    path = template_folder("outbox") / "shop.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        connection.exec_driver_sql("CREATE TABLE orders (id TEXT)")
    Inbox(engine, clock=lambda: START).migrate()
    engine.dispose()
    return path
