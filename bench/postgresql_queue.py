"""A PostgreSQL queue in the inbox's database: one commit, against the same SQL by hand and against Redis with an inbox;
and what a claim costs after a million messages, behind a backlog, and past dead rows that no vacuum may remove."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import redis
from sqlalchemy import Engine, create_engine, text

from bench.measure import Line, compare, ratio
from onceward import ConsumerTask, Transaction
from onceward.connectors.codec import decode, encode, encode_all
from onceward.connectors.postgresql import PostgreSqlConnector, append_in
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.inbox import Contract, Inbox, InboxSession
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.testing.servers import postgres_server, redis_server
from onceward.transaction import Settlement, Verdict

COUNT = 1000
BATCH = 100
MANY = 1_000_000
DEAD = 100_000
CLAIMS = 50
TABLES = (
    "CREATE TABLE orders (id TEXT, total INTEGER)",
    "CREATE TABLE seen (consumer TEXT, id TEXT, digest TEXT, PRIMARY KEY (consumer, id))",
    """
    CREATE TABLE jobs (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, visible_at DOUBLE PRECISION NOT NULL
        DEFAULT 0, token BIGINT, deliveries INTEGER NOT NULL DEFAULT 0, body BYTEA NOT NULL)
    """,
)
CLAIM = text("""
    WITH claimed AS MATERIALIZED (
        SELECT id FROM jobs WHERE visible_at <= extract(epoch FROM clock_timestamp()) ORDER BY id LIMIT :size
        FOR UPDATE SKIP LOCKED
    )
    UPDATE jobs SET visible_at = extract(epoch FROM clock_timestamp()) + 60, token = :token, deliveries = deliveries + 1
    FROM claimed WHERE jobs.id = claimed.id RETURNING jobs.id, jobs.body
""")
SEEN = text("INSERT INTO seen VALUES ('orders', :id, :digest) ON CONFLICT DO NOTHING")
ORDER = text("INSERT INTO orders VALUES (:id, :total)")
REMOVE = text("DELETE FROM jobs WHERE id = :id AND token = :token")
CONTRACT = Contract(
    consumer_id="orders", event_types=["*"], owner_team="bench", idempotency_mechanism="inbox"
)
POLICY = ConsumerPolicy.model_validate({"loop": {"batch": {"size": BATCH}, "limit": COUNT}})


class Orders(ConsumerTask):
    contract = CONTRACT

    def process_transaction(self, transaction: Transaction, session: InboxSession) -> None:
        session.execute(ORDER, {"id": transaction.id, "total": transaction.payload["total"]})


class OrdersInGroups(Orders):
    commit = "group"


def lines() -> Iterator[Line]:
    with postgres_server() as server, redis_server() as wire:
        bench = OnPostgres(server.url, wire.url)
        yield ratio(
            "PostgreSQL queue, one commit, by hand",
            compare(COUNT, bench.by_hand, bench.ours, prepare=bench.fill),
            at_most=1 / 0.8,
        )
        yield ratio(
            "PostgreSQL queue, one commit, Redis + inbox",
            compare(COUNT, bench.on_redis, bench.ours, prepare=bench.fill),
            at_most=1 / 1.5,
        )
        grouped = partial(bench.ours, OrdersInGroups)
        yield ratio(
            "PostgreSQL queue, commit=group, Redis + inbox",
            compare(COUNT, bench.on_redis, grouped, prepare=bench.fill),
            at_most=1 / 1.5,
        )
        yield ratio(
            "the same, Redis + inbox with commit=group, too",
            compare(COUNT, partial(bench.on_redis, OrdersInGroups), grouped, prepare=bench.fill),
            at_most=1 / 1.5,
        )
        yield from bench.claims()
        bench.close()


class OnPostgres:
    def __init__(self, url: str, redis_url: str) -> None:
        self.url = url
        self.redis_url = redis_url
        self.engine: Engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
        self.redis = redis.Redis.from_url(redis_url)
        self.inbox = Inbox(self.engine)
        self.inbox.migrate()
        self.inbox.register(CONTRACT)
        with self.engine.begin() as connection:
            for table in TABLES:
                connection.execute(text(table))
        self._numbers = itertools.count()

    def fill(self) -> None:
        """The same messages in each of the queues."""
        first = next(self._numbers) * COUNT
        sent = [Transaction(f"order-{first + n}", {"total": n}) for n in range(COUNT)]
        bodies = [encode(each) for each in sent]
        self.stream = uuid.uuid4().hex
        pipeline = self.redis.pipeline(transaction=False)
        for transaction, body in zip(sent, bodies, strict=True):
            pipeline.xadd(self.stream, {"id": transaction.id, "body": body})
        pipeline.execute()
        with PostgreSqlConnector(self.url, "orders") as queue:
            left = queue.fetch_transactions(COUNT)
            queue.settle_transactions([Settlement(each, Verdict.DONE) for each in left])
            queue.dispatch_transactions(sent)
        with self.engine.begin() as connection:
            connection.execute(text("TRUNCATE jobs"))
            connection.execute(
                text("INSERT INTO jobs (body) VALUES (:body)"), [{"body": body} for body in bodies]
            )
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in ("VACUUM ANALYZE jobs", "VACUUM ANALYZE onceward_queue_messages", "CHECKPOINT"):
                connection.execute(text(statement))

    def by_hand(self) -> None:
        done = 0
        while True:
            token = uuid.uuid4().int >> 65
            with self.engine.begin() as connection:
                rows = connection.execute(CLAIM, {"size": BATCH, "token": token}).all()
            if not rows:
                break
            for id_, body in rows:
                with self.engine.begin() as connection:
                    transaction = decode(body)
                    digest = hashlib.sha256(body).hexdigest()
                    connection.execute(SEEN, {"id": f"hand-{transaction.id}", "digest": digest})
                    connection.execute(ORDER, {"id": transaction.id, "total": transaction.payload["total"]})
                    assert connection.execute(REMOVE, {"id": id_, "token": token}).rowcount == 1
                done += 1
        assert done == COUNT

    def ours(self, kind: type[Orders] = Orders) -> None:
        with PostgreSqlConnector(self.url, "orders") as queue:
            self._consume(kind, queue)

    def on_redis(self, kind: type[Orders] = Orders) -> None:
        with RedisStreamsConnector(self.redis_url, self.stream) as queue:
            self._consume(kind, queue)

    def _consume(self, kind: type[Orders], queue: Any) -> None:
        report = kind({"source": queue}, {"inbox": self.inbox}).consume_transactions(POLICY)
        assert report.succeeded == COUNT

    # ── what a claim costs

    def claims(self) -> Iterator[Line]:
        """In microseconds for a claim of 100, the median of some."""
        with PostgreSqlConnector(self.url, "million") as queue:
            first = self._claim(queue)
            sizes = []
            for _ in range(2):
                for _ in range(MANY // 2000):
                    self._turn_over(queue, 1000)
                sizes.append(self._size())
            yield _flat("claim of 100, after a million messages", first, self._claim(queue), at_most=1.5)
            half, whole = sizes
            yield Line(
                "size of table and index, after half of them and all", half, whole, "≤ 1.5 ×", whole <= 1.5 * half,
                f"{whole / half:.2f} ×", "MB",
            )  # fmt: skip
            with self.engine.begin() as connection:
                append_in(connection, "million", encode_all([Transaction()]) * MANY)
            yield _flat("claim of 100, a million ready", first, self._claim(queue), at_most=1.5)
            with self.engine.begin() as connection:
                append_in(connection, "million", encode_all([Transaction()]) * MANY, time.time() + 3600)
            yield _flat("claim of 100, a million waiting for a time", first, self._claim(queue), at_most=1.5)
        with PostgreSqlConnector(self.url, "dead") as queue, closing(psycopg.connect(self.url)) as old:
            old.execute("SELECT txid_current()")  # no vacuum removes what dies from now on
            queue.dispatch_transactions([Transaction()] * (DEAD + CLAIMS * BATCH + BATCH))
            for _ in range(DEAD // 1000):
                self._end(queue, 1000)
            yield _flat(
                "claim of 100, past 100,000 dead rows", first, self._claim(queue, fill=False), at_most=2
            )

    def _size(self) -> float:
        """Of the queue's table and its index, in megabytes."""
        with self.engine.connect() as connection:
            size = connection.execute(
                text("SELECT pg_total_relation_size('onceward_queue_messages')")
            ).scalar_one()
        return float(size) / 1e6

    def _claim(self, queue: PostgreSqlConnector, *, fill: bool = True) -> float:
        if fill:
            queue.dispatch_transactions([Transaction()] * (CLAIMS * BATCH))
        return statistics.median(self._end(queue, BATCH) for _ in range(CLAIMS))

    def _turn_over(self, queue: PostgreSqlConnector, number: int) -> None:
        queue.dispatch_transactions([Transaction()] * number)
        self._end(queue, number)

    def _end(self, queue: PostgreSqlConnector, number: int) -> float:
        """Claim and settle them. Returns how long the claim took, in microseconds."""
        began = time.perf_counter()
        taken = queue.fetch_transactions(number)
        took = (time.perf_counter() - began) * 1e6
        assert len(taken) == number
        queue.settle_transactions([Settlement(each, Verdict.DONE) for each in taken])
        return took

    def close(self) -> None:
        self.engine.dispose()
        self.redis.close()


def _flat(what: str, first: float, later: float, at_most: float) -> Line:
    return ratio(what, (first, later), at_most=at_most)
