"""The inbox under the engine, against a hand-written loop that does the same inserts in one transaction."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Engine, create_engine, event, text

from bench.measure import Line, compare, ratio
from onceward import ConsumerTask, Transaction
from onceward.inbox import Contract, Inbox, InboxSession
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.testing.servers import postgres_server

COUNT = 1000
BATCH = 100
MANY = 1_000_000
TABLES = (
    "CREATE TABLE orders (id TEXT, total INTEGER)",
    "CREATE TABLE seen (consumer TEXT, id TEXT, digest TEXT, PRIMARY KEY (consumer, id))",
)
TIDY = {
    "sqlite": ("PRAGMA wal_checkpoint(TRUNCATE)",),
    "postgresql": ("VACUUM ANALYZE onceward_dedup", "CHECKPOINT"),
}
SEEN = text("INSERT INTO seen VALUES (:consumer, :id, :digest) ON CONFLICT DO NOTHING")
ORDER = text("INSERT INTO orders VALUES (:id, :total)")
CONTRACT = Contract(
    consumer_id="orders", event_types=["*"], owner_team="bench", idempotency_mechanism="inbox"
)
POLICY = ConsumerPolicy.model_validate({"loop": {"batch": {"size": BATCH}}})


class Feed:
    """A source that only delivers."""

    def __init__(self, given: Sequence[Transaction]) -> None:
        self._left = list(given)

    def fetch_transactions(self, size: int) -> list[Transaction]:
        batch, self._left = self._left[:size], self._left[size:]
        return batch


class Orders(ConsumerTask):
    contract = CONTRACT

    def process_transaction(self, transaction: Transaction, session: InboxSession) -> None:
        session.execute(ORDER, {"id": transaction.id, "total": transaction.payload["total"]})


def lines() -> Iterator[Line]:
    for name, database in (("SQLite", sqlite), ("PostgreSQL", postgresql)):
        with database() as engine:
            yield from on(name, engine)


def on(name: str, engine: Engine) -> Iterator[Line]:
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(CONTRACT)
    with engine.begin() as connection:
        for table in TABLES:
            connection.execute(text(table))
    numbers = itertools.count()

    def new() -> list[Transaction]:
        return [
            Transaction(id=f"order-{next(numbers)}", payload={"order": 1, "total": 7}) for _ in range(COUNT)
        ]

    def consume(given: Sequence[Transaction]) -> Any:
        return Orders({"source": Feed(given)}, {"inbox": inbox}).consume_transactions(POLICY)

    def ours() -> None:
        assert consume(new()).succeeded == COUNT

    done = new()
    consume(done)

    def duplicates() -> None:
        assert consume(done).duplicates == COUNT

    yield ratio(
        f"inbox, {name}, one insert",
        compare(COUNT, lambda: by_hand(engine, new()), ours, rounds=10),
        at_most=1.25,
    )
    yield ratio(
        f"inbox, {name}, a duplicate against a new event", compare(COUNT, ours, duplicates), at_most=1.0
    )
    yield among_many(name, engine, ours)


def by_hand(engine: Engine, given: Sequence[Transaction]) -> None:
    for transaction in given:
        with engine.begin() as connection:
            digest = hashlib.sha256(msgspec.msgpack.encode(transaction.payload)).hexdigest()
            seen = {"consumer": "orders", "id": transaction.id, "digest": digest}
            if connection.execute(SEEN, seen).rowcount == 1:
                connection.execute(ORDER, {"id": transaction.id, "total": transaction.payload["total"]})


def among_many(name: str, engine: Engine, ours: Callable[[], None]) -> Line:
    """The same with a million dedup rows of one day, against few rows: the best of several runs each, in sequence."""
    few, _ = compare(COUNT, ours, lambda: None)
    day = int(datetime.now(UTC).timestamp()) // 86400
    with engine.begin() as connection:
        connection.execute(text(filling(engine)), {"day": day, "many": MANY})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        # Finish the work that filling the table left behind, so it is not measured.
        for tidy in TIDY[engine.dialect.name]:
            connection.execute(text(tidy))
    many, _ = compare(COUNT, ours, lambda: None)
    return ratio(f"inbox, {name}, {MANY:,} rows against few", (few, many), at_most=1.1)


def filling(engine: Engine) -> str:
    if engine.dialect.name == "postgresql":
        return """
            INSERT INTO onceward_dedup (event_day, own_day, consumer_id, tracking_id, payload_sha256)
            SELECT -1, :day, 'orders', gen_random_uuid()::text, sha256(n::text::bytea)
            FROM generate_series(1, :many) AS n
        """
    return """
        INSERT INTO onceward_dedup (own_day, keep_day, consumer_id, tracking_id, payload_sha256, processed_at)
        SELECT :day, :day, 'orders', lower(hex(randomblob(16))), randomblob(32), 0
        FROM (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :many) SELECT i FROM n)
    """


@contextmanager
def sqlite() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as directory:
        engine = create_engine(f"sqlite:///{Path(directory) / 'bench.db'}")

        @event.listens_for(engine, "connect")
        def durable(connection: Any, _: object) -> None:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")

        yield engine
        engine.dispose()


@contextmanager
def postgresql() -> Iterator[Engine]:
    with postgres_server() as server:
        engine = create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"))
        yield engine
        engine.dispose()
