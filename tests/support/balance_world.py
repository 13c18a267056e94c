"""A consumer, its source and its database, which a test can use, damage and restore, with an oracle that knows what is
really missing."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import nats
from msgspec import structs
from nats.js.errors import NotFoundError
from redis import Redis

from onceward import Onceward, Transaction
from onceward._nats.wire import nats_loop
from onceward.app.build import open_task
from onceward.connectors.codec import decode, encode
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.connectors.urls import Address
from onceward.deadletters import DeadLetters, EditRefusedError, Filter, Rca
from onceward.inbox import Contract, InboxSession
from onceward.inspection.balance import Balance
from onceward.inspection.counts import Account, balance_of
from tests.support.schema import Schema

GOOD, REFUSED, FAILING, UNREADABLE = "good", "refused", "failing", "unreadable"
FLAKY = "flaky"
"""Fails every other time."""


class World:
    def __init__(
        self, folder: Path, source: str, redis: Redis | None = None, database: str | None = None
    ) -> None:
        self.folder, self.source, self.redis = folder, source, redis
        self.database = folder / "shop.db"
        """The inbox, unless it is elsewhere."""
        self.place = database or f"sqlite:///{self.database}"
        self.sent: list[Transaction] = []
        self.appended = 0
        self.is_fixed = False
        self.tries: Counter[str] = Counter()
        self.app = Onceward("shop", database=self.place)
        contract = Contract(
            consumer_id="billing",
            event_types=["order", "order.other"],
            owner_team="shop",
            idempotency_mechanism="one transaction",
        )

        @self.app.consumer(source, contract=contract)
        def charge(order: Any, transaction: Transaction, session: InboxSession) -> None:
            if order["kind"] == FAILING and not self.is_fixed:
                raise ValueError("no")
            self.tries[transaction.id] += 1
            if order["kind"] == FLAKY and self.tries[transaction.id] % 2:
                raise ValueError("not now")
            session.execute("INSERT INTO effects (id) VALUES (:id)", {"id": transaction.id})

        self.do("CREATE TABLE effects (id TEXT NOT NULL)")
        [self.consumer] = self.app.consumers.values()
        self.account = Account(self.consumer.source, "billing", self.place, contract=True, may_be_new=True)

    # ── what people do ──────────────────────────────────────────────────────────────────────────────────

    def send(self, kind: str = GOOD, times: int = 1) -> None:
        metadata = {"event_type": "other" if kind == REFUSED else "order"}
        payload = "nonsense" if kind == UNREADABLE else {"kind": kind}
        transaction = Transaction(payload=payload, metadata=metadata)
        self.sent.append(transaction)
        self._append([transaction] * times)

    def send_copy(self, random: Random) -> None:
        if self.sent:
            self._append([random.choice(self.sent)])

    def send_conflict(self, random: Random) -> None:
        """Send something else under an id that was sent before: another payload, or another event type."""
        if self.sent:
            before = random.choice(self.sent)
            other = random.choice(
                [{"payload": {"kind": GOOD, "other": True}}, {"metadata": {"event_type": "order.other"}}]
            )
            self._append([structs.replace(before, **other)])

    def _append(self, transactions: list[Transaction]) -> None:
        with Address(self.source).open(asynchronous=False) as connector:
            connector.dispatch_transactions(transactions)
        self.appended += len(transactions)

    def consume(self, limit: int | None = None) -> None:
        policy = self.consumer.policy.model_validate(
            {"loop": {"limit": limit, "batch": {"size": limit or 10}}}
        )
        with open_task(self.app, self.consumer) as task:
            task.consume_transactions(policy)

    def drain(self) -> None:
        self.consume()
        self.consume()

    def balance(self) -> Balance:
        return balance_of(self.account)

    def letters(self, act: Callable[[DeadLetters], Any]) -> Any:
        engine = self.app.create_engine()
        try:
            return act(DeadLetters(engine))
        finally:
            engine.dispose()

    def redrive(self, letter_id: int) -> None:
        rca = Rca(category="infrastructure", root_cause="a bug", fix_ref="#1")
        wanted = Filter(consumer="billing", ids=(letter_id,))
        self.letters(lambda letters: letters.redrive(wanted, rca=rca, operator="me", rate=1000))

    def discard(self, letter_id: int) -> None:
        wanted = Filter(ids=(letter_id,))
        self.letters(lambda letters: letters.discard(wanted, reason="a test", operator="me"))

    def correct(self, letter_id: int) -> None:
        """Edit the payload of a letter."""
        with open_task(self.app, self.consumer) as task, suppress(EditRefusedError):
            self.letters(
                lambda letters: letters.edit(
                    letter_id, {"kind": GOOD, "edited": True}, task=task, cause="a test", operator="me"
                )
            )

    # ── what the oracle knows ───────────────────────────────────────────────────────────────────────────

    def ask(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self.database, timeout=10)) as database:
            try:
                return database.execute(query).fetchall()
            except sqlite3.OperationalError:  # the inbox has no tables before the first run
                return []

    def do(self, statement: str) -> int:
        with closing(sqlite3.connect(self.database, timeout=10)) as database, database:
            return database.execute(statement).rowcount

    def effects(self) -> list[str]:
        return [row[0] for row in self.ask("SELECT id FROM effects")]

    def lost(self) -> set[str]:
        """Ids that were sent, and are nowhere: not in the inbox, not a letter, not in the source."""
        return {each.id for each in self.sent} - self.known() - self.waiting()

    def known(self) -> set[str]:
        letters = self.ask("SELECT message_id FROM onceward_dead_letters")
        return self.records() | {row[0] for row in letters}

    def records(self) -> set[str]:
        return {row[0] for row in self.ask("SELECT tracking_id FROM onceward_dedup")}

    def waiting(self) -> set[str]:
        raise NotImplementedError


class SqliteWorld(World):
    def __init__(self, folder: Path) -> None:
        self.queue = folder / "orders.db"
        super().__init__(folder, f"sqlite:///{self.queue}?on_failure=dead_letter")

    def waiting(self) -> set[str]:
        if not self.queue.exists():
            return set()
        with closing(sqlite3.connect(self.queue)) as queue:
            rows = queue.execute(
                "SELECT body FROM messages UNION ALL SELECT body FROM dead_letters"
            ).fetchall()
        return {decode(body).id for (body,) in rows}

    def execute(self, statement: str) -> int:
        with closing(sqlite3.connect(self.queue)) as queue, queue:
            return queue.execute(statement).rowcount


class NamedWorld(SqliteWorld):
    """A queue in the inbox's own file: a message leaves it in the transaction of its handler."""

    def __init__(self, folder: Path) -> None:
        self.queue = folder / "shop.db"
        World.__init__(self, folder, f"sqlite:///{self.queue}?queue=orders&on_failure=dead_letter")

    def waiting(self) -> set[str]:
        rows = [
            row
            for name in ("messages", "dead_letters")
            for row in self.ask(f"SELECT body FROM onceward_queue_orders_{name}")
        ]
        return {decode(body).id for (body,) in rows}

    def execute(self, statement: str) -> int:
        return super().execute(statement.replace("messages", "onceward_queue_orders_messages"))


class RedisWorld(World):
    def __init__(self, folder: Path, url: str, stream: str) -> None:
        self.redis: Redis = Redis.from_url(url)
        self.stream = stream
        super().__init__(folder, f"{url}/{stream}?group=billing&on_failure=dead_letter", self.redis)

    def waiting(self) -> set[str]:
        if not self.redis.exists(self.stream):
            return set()
        groups = {each["name"]: each["last-delivered-id"] for each in self.redis.xinfo_groups(self.stream)}
        read_to = groups.get(b"billing", b"0-0")
        waiting = {fields[b"id"].decode() for _, fields in self.redis.xrange(self.stream, b"(" + read_to)}
        for entry in self.pending():
            for _, fields in self.redis.xrange(self.stream, entry, entry):
                waiting.add(fields[b"id"].decode())
        dead = self.redis.xrange(f"{{{self.stream}}}:billing:dead")
        return waiting | {fields[b"id"].decode() for _, fields in dead}

    def pending(self) -> list[bytes]:
        if not self.has_group():
            return []
        return [
            each["message_id"]
            for each in self.redis.xpending_range(self.stream, "billing", min="-", max="+", count=10_000)
        ]

    def unread(self) -> list[bytes]:
        if not self.redis.exists(self.stream):
            return []
        groups = {each["name"]: each["last-delivered-id"] for each in self.redis.xinfo_groups(self.stream)}
        return [entry for entry, _ in self.redis.xrange(self.stream, b"(" + groups.get(b"billing", b"0-0"))]

    def ended(self) -> list[bytes]:
        open_ = {*self.unread(), *self.pending()}
        return [entry for entry, _ in self.redis.xrange(self.stream) if entry not in open_]

    def has_group(self) -> bool:
        return any(each["name"] == b"billing" for each in self.redis.xinfo_groups(self.stream))

    def send_by_hand(self) -> None:
        """As a program does that does not use onceward."""
        transaction = Transaction(payload={"kind": GOOD}, metadata={"event_type": "order"})
        self.sent.append(transaction)
        self.redis.xadd(self.stream, {"id": transaction.id, "body": encode(transaction)})
        self.appended += 1

    def acknowledge_by_hand(self) -> None:
        [[_, [(entry, _)]]] = self.redis.xreadgroup("billing", "somebody", {self.stream: ">"}, count=1)
        self.redis.xack(self.stream, "billing", entry)

    def dump(self) -> dict[bytes, bytes]:
        return {key: self.redis.dump(key) for key in self.redis.scan_iter(f"*{self.stream}*")}

    def restore(self, dump: dict[bytes, bytes]) -> None:
        """As a Redis that comes back from an old file."""
        for key in list(self.redis.scan_iter(f"*{self.stream}*")):
            self.redis.delete(key)
        for key, value in dump.items():
            self.redis.restore(key, 0, value)


class PostgreSqlWorld(World):
    TABLES = ("messages", "delayed", "dead_letters", "log", "totals", "forgotten")

    def __init__(self, folder: Path, schema: Schema, *, joint: bool = False) -> None:
        """`joint`: the inbox is in the same schema, and a message leaves the queue in the transaction of its
        handler."""
        self.schema = schema
        server, _, options = schema.plain_url.partition("?")
        self.url = schema.plain_url
        self.joint = joint
        source = f"{server}/orders?{options}&on_failure=dead_letter"
        super().__init__(folder, source, database=self.url if joint else None)

    def ask(self, query: str) -> list[Any]:
        if not self.joint:
            return super().ask(query)
        table = query.partition(" FROM ")[2].split()[0]
        if not self.schema.execute(f"SELECT to_regclass('{self.schema.name}.{table}') IS NOT NULL")[0][0]:
            return []
        return self.schema.execute(query.replace(f" FROM {table}", f" FROM {self.schema.name}.{table}"))

    def do(self, statement: str) -> int:
        if not self.joint:
            return super().do(statement)
        self.schema.execute(f"SET search_path = {self.schema.name}; {statement}; RESET search_path")
        return 1

    def waiting(self) -> set[str]:
        if not self.exists:
            return set()
        tables = ("messages", "delayed", "dead_letters")
        return {decode(bytes(body)).id for table in tables for (body,) in self.rows(table, "body")}

    @property
    def exists(self) -> bool:
        name = f"{self.schema.name}.onceward_queue_messages"
        return bool(self.schema.execute(f"SELECT to_regclass('{name}') IS NOT NULL")[0][0])

    def rows(self, table: str, columns: str) -> list[Any]:
        return self.schema.execute(f"SELECT {columns} FROM {self.schema.name}.onceward_queue_{table}")

    def lose_newest(self) -> bool:
        table = f"{self.schema.name}.onceward_queue_messages"
        return bool(
            self.schema.execute(
                f"DELETE FROM {table} WHERE seq = (SELECT max(seq) FROM {table}) RETURNING seq"
            )
        )

    def forget(self, kept: int) -> None:
        with PostgreSqlConnector(self.url, "orders") as queue, queue._rows.transaction(10.0):
            queue._rows.fold(kept=kept)

    def back_up(self) -> None:
        for table in self.TABLES:
            name = f"{self.schema.name}.onceward_queue_{table}"
            self.schema.execute(f"CREATE TABLE {self.schema.name}.kept_{table} AS SELECT * FROM {name}")

    def restore(self) -> None:
        for table in self.TABLES:
            name = f"{self.schema.name}.onceward_queue_{table}"
            self.schema.execute(f"TRUNCATE {name}")
            self.schema.execute(
                f"INSERT INTO {name} OVERRIDING SYSTEM VALUE SELECT * FROM {self.schema.name}.kept_{table}"
            )


class JetStreamWorld(World):
    def __init__(self, folder: Path, url: str, stream: str) -> None:
        self.url, self.stream = url, stream
        super().__init__(folder, f"{url}/{stream}?consumer=billing&on_failure=dead_letter")

    def ask_nats(self, work: Callable[[Any], Any]) -> Any:
        """None if there is no such stream, message or consumer."""

        async def run() -> Any:
            client = await nats.connect(self.url)
            try:
                return await work(client.jetstream())
            except NotFoundError:
                return None
            finally:
                await client.close()

        return asyncio.run_coroutine_threadsafe(run(), nats_loop()).result(30)

    def waiting(self) -> set[str]:
        async def read(js: Any) -> set[str]:
            last = (await js.stream_info(self.stream)).state.last_seq
            done = await self._floor(js)
            found = set()
            for number in range(done + 1, last + 1):
                try:
                    found.add(decode((await js.get_msg(self.stream, number)).data).id)
                except NotFoundError:
                    continue
            return found

        return self.ask_nats(read) or set()

    async def _floor(self, js: Any) -> int:
        """The number up to which all is done: nothing is in flight while nobody consumes."""
        try:
            return int((await js.consumer_info(self.stream, "billing")).ack_floor.stream_seq)
        except NotFoundError:
            return 0

    def remove_unread(self) -> bool:
        async def remove(js: Any) -> bool:
            last = (await js.stream_info(self.stream)).state.last_seq
            return last > await self._floor(js) and bool(await js.delete_msg(self.stream, last))

        return bool(self.ask_nats(remove))

    def remove_ended(self) -> None:
        async def remove(js: Any) -> None:
            await js.purge_stream(self.stream, seq=await self._floor(js) + 1)

        self.ask_nats(remove)

    def remove_all(self) -> None:
        self.ask_nats(lambda js: js.purge_stream(self.stream))

    def delete_consumer(self) -> None:
        self.ask_nats(lambda js: js.delete_consumer(self.stream, "billing"))

    def delete_stream(self) -> None:
        self.ask_nats(lambda js: js.delete_stream(self.stream))


def copy_database(of: Path, to: Path) -> None:
    """Copy a SQLite database, also one that exists already."""
    with closing(sqlite3.connect(of)) as old, closing(sqlite3.connect(to)) as new:
        old.backup(new)
