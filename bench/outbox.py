"""The outbox: a send against a plain INSERT, commit to sink when idle, and the relay against a loop of the same SQL."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import redis
from sqlalchemy import Engine, text

from bench.measure import Line, compare, ratio
from onceward import Onceward
from onceward._ids import new_id
from onceward.app.build import open_task
from onceward.app.relay import RelayConsumer
from onceward.connectors.codec import decode
from onceward.inbox import Inbox
from onceward.run.outages import policy_of_run
from onceward.testing.servers import postgres_server, redis_server

SENDS = 2_000
MESSAGES = 20_000
CLAIMED = 500
IDLE_SENDS = 150
HELD = 1_000_000
"""Messages that wait until next year, while others are due."""
DUE = 500
DUE_WITHIN = 5.0
"""Seconds over which they become due."""
PAYLOAD = {"order": 4711, "item": "a book", "amount": 1250, "currency": "EUR"}

INSERT = "INSERT INTO {table} (id, target, body, created_at) VALUES (:id, :target, :body, :at)"
PLAIN = """
    CREATE TABLE plain (id text PRIMARY KEY, target text NOT NULL, body {binary} NOT NULL, created_at float NOT NULL)
"""
"""A table with its key and no other index, for the plain INSERT."""
HAND_WRITTEN = (
    """CREATE TABLE events (seq {number}, id text NOT NULL UNIQUE, target text NOT NULL, body {binary} NOT NULL,
        created_at float NOT NULL, published_at float)""",
    "CREATE INDEX events_waiting ON events (target, seq) WHERE published_at IS NULL",
)
"""An outbox as one would write it by hand: a number for its order, an id, and an index of what waits."""
CLAIM = """
    UPDATE onceward_outbox SET state = 'held', token = 1, attempts = attempts + 1, at = 1e18 WHERE seq IN (
        SELECT seq FROM onceward_outbox WHERE state = 'ready' AND target = :target ORDER BY seq LIMIT :limit {skip}
    ) RETURNING seq, body
"""
HOLD = """
    INSERT INTO onceward_outbox (message_id, target, key, state, at, digest, body, created_at)
    WITH RECURSIVE numbers(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < :last)
    SELECT message_id || '-' || number, target, key, state, at + number, digest, body, created_at
    FROM onceward_outbox, numbers WHERE message_id = 'held'
"""
PUBLISH = "UPDATE onceward_outbox SET state = 'published', token = NULL, at = NULL, ended_at = 1 WHERE state = 'held'"


def lines() -> Iterator[Line]:
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory())
        server = opened.enter_context(postgres_server())
        stream = opened.enter_context(redis_server())
        urls = {"SQLite": f"sqlite:///{Path(directory) / 'shop.db'}", "PostgreSQL": server.url}
        for name, url in urls.items():
            bench = OnDatabase(url, stream.url)
            opened.callback(bench.engine.dispose)
            for what, insert in (
                ("a plain INSERT", bench.insert_plain),
                ("an outbox by hand", bench.insert_by_hand),
            ):
                yield ratio(
                    f"Outbox, {name}, send and {what}",
                    compare(SENDS, insert, bench.send, prepare=bench.clear),
                    at_most=1.2,
                )
            yield from bench.latency(name)
            yield bench.lateness(name)
            measured = compare(MESSAGES, bench.loop, bench.relay, prepare=bench.fill, rounds=3)
            yield ratio(f"Outbox, {name}, relay to Redis, 20,000 messages", measured, at_most=1 / 0.5)
            rate = 1e6 / measured[1]
            yield Line(
                f"Outbox, {name}, messages per second to Redis",
                5000,
                rate,
                "≥ 5000/s",
                rate >= 5000,
                f"{rate:.0f}/s",
                "/s",
            )


class OnDatabase:
    def __init__(self, url: str, redis_url: str) -> None:
        self.app = Onceward("bench", database=url)
        self.engine: Engine = self.app.create_engine()
        self.client = redis.Redis.from_url(redis_url)
        self.target = f"{redis_url}/orders"
        self.sqlite = self.engine.dialect.name == "sqlite"
        Inbox(self.engine).migrate()
        with self.engine.begin() as connection:
            if self.sqlite:
                connection.execute(text("PRAGMA journal_mode = WAL"))
            binary = "BLOB" if self.sqlite else "bytea"
            number = (
                "INTEGER PRIMARY KEY" if self.sqlite else "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
            )
            for statement in (PLAIN, *HAND_WRITTEN):
                connection.execute(text(statement.format(number=number, binary=binary)))

    def clear(self) -> None:
        self.client.flushall()
        with self.engine.begin() as connection:
            connection.execute(text("DELETE FROM plain"))
            connection.execute(text("DELETE FROM events"))
            connection.execute(text("DELETE FROM onceward_outbox"))
            connection.execute(text("DELETE FROM onceward_outbox_tally"))  # of those that were just deleted

    def fill(self) -> None:
        self.clear()
        with self.engine.begin() as connection:
            sender = self.app.outbox(connection)
            for _ in range(MESSAGES):
                sender.send(self.target, PAYLOAD)
        if not self.sqlite:
            with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("VACUUM ANALYZE onceward_outbox"))

    def insert_plain(self) -> None:
        self._insert("plain")

    def insert_by_hand(self) -> None:
        self._insert("events")

    def _insert(self, table: str) -> None:
        statement = text(INSERT.format(table=table))
        with self.engine.begin() as connection:
            for _ in range(SENDS):
                values: dict[str, Any] = {
                    "id": new_id(),
                    "target": self.target,
                    "body": msgspec.msgpack.encode(PAYLOAD),
                    "at": time.time(),
                }
                connection.execute(statement, values)

    def send(self) -> None:
        with self.engine.begin() as connection:
            for _ in range(SENDS):
                self.app.outbox(connection).send(self.target, PAYLOAD)

    def loop(self) -> None:
        claim = text(CLAIM.replace("{skip}", "" if self.sqlite else "FOR UPDATE SKIP LOCKED"))
        while True:
            with self.engine.begin() as connection:
                rows = connection.execute(claim, {"target": self.target, "limit": CLAIMED}).all()
            if not rows:
                return
            with self.client.pipeline(transaction=False) as pipe:
                for row in rows:
                    pipe.xadd("orders", {"body": bytes(row.body)})
                pipe.execute()
            with self.engine.begin() as connection:
                connection.execute(text(PUBLISH))

    def relay(self) -> None:
        consumer = RelayConsumer(self.app)
        with open_task(self.app, consumer) as task:
            stopper = threading.Thread(target=self._stop_when_published, args=(task,))
            stopper.start()
            task.consume_transactions(policy_of_run(consumer.policy, streaming=True))
            stopper.join()

    def _stop_when_published(self, task: Any) -> None:
        while self.client.xlen("orders") < MESSAGES:
            time.sleep(0.005)
        task.stop()

    def latency(self, name: str) -> Iterator[Line]:
        """From before the commit until the message is in the sink, when nothing else happens."""
        self.clear()
        consumer = RelayConsumer(self.app)
        waits: list[float] = []
        with open_task(self.app, consumer) as task:
            policy = policy_of_run(consumer.policy, streaming=True)
            running = threading.Thread(target=task.consume_transactions, args=(policy,))
            running.start()
            time.sleep(3.0)
            for number in range(IDLE_SENDS):
                with self.engine.connect() as connection:
                    self.app.outbox(connection).send(self.target, PAYLOAD)
                    began = time.perf_counter()
                    connection.commit()
                while self.client.xlen("orders") <= number:
                    time.sleep(0.0002)
                waits.append((time.perf_counter() - began) * 1000)
                time.sleep(0.03 + 0.001 * (number % 40))
            task.stop()
            running.join()
        waits.sort()
        for what, value, limit in (("p50", waits[len(waits) // 2], 10.0), ("p99", waits[-2], 50.0)):
            yield Line(
                f"Outbox, {name}, commit to sink when idle, {what}", limit, value, f"≤ {limit:g} ms", value <= limit,
                f"{value:.1f} ms", "ms",
            )  # fmt: skip

    def lateness(self, name: str) -> Line:
        """How late delayed messages arrive at the sink, by its clock, while a million wait for next year."""
        self.clear()
        with self.engine.begin() as connection:
            self.app.outbox(connection).send(self.target, PAYLOAD, id="held", delay=365 * 86400.0)
            connection.execute(text(HOLD), {"last": HELD - 1})
        due: dict[str, float] = {}
        consumer = RelayConsumer(self.app)
        with open_task(self.app, consumer) as task:
            policy = policy_of_run(consumer.policy, streaming=True)
            running = threading.Thread(target=task.consume_transactions, args=(policy,))
            running.start()
            time.sleep(3.0)  # it has begun to wait
            with self.engine.begin() as connection:
                begin = time.time() + 3.0
                for number in range(DUE):
                    at = datetime.fromtimestamp(begin + DUE_WITHIN * number / DUE, UTC)
                    due[self.app.outbox(connection).send(self.target, PAYLOAD, at=at)] = at.timestamp()
            while self.client.xlen("orders") < DUE:
                time.sleep(0.05)
            task.stop()
            running.join()
        entries: Any = self.client.xrange("orders")
        late = sorted(
            int(entry.partition(b"-")[0]) / 1000 - due[decode(fields[b"body"]).id]
            for entry, fields in entries
        )
        value = late[int(len(late) * 0.99)] * 1000
        return Line(
            f"Outbox, {name}, late by, {HELD:,} delayed, p99", 1000.0, value, "≤ 1000 ms", value <= 1000.0,
            f"{value:.0f} ms", "ms",
        )  # fmt: skip
