"""The SQLite connector under the engine, against a hand-written loop of the same SQL; both durable."""

from __future__ import annotations

import secrets
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.measure import Line, compare, ratio
from onceward import ConsumerTask, Transaction
from onceward.connectors.sqlite import SqliteConnector
from onceward.connectors.sqlite import statements as sql
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.transaction import Settlement, Verdict

COUNT = 10_000
BATCH = 100


def orders() -> list[Transaction]:
    return [
        Transaction(id=f"order-{number}", payload={"order": number, "total": 19.99})
        for number in range(COUNT)
    ]


class Consume(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        return None


def lines() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as directory:
        numbers = iter(range(1_000_000))
        given = orders()
        policy = ConsumerPolicy.model_validate({"loop": {"batch": {"size": BATCH}}})

        def connector_alone() -> None:
            with SqliteConnector(Path(directory) / f"{next(numbers)}.db") as connector:
                for at in range(0, COUNT, BATCH):
                    connector.dispatch_transactions(given[at : at + BATCH])
                while batch := connector.fetch_transactions(BATCH):
                    connector.settle_transactions([Settlement(each, Verdict.DONE) for each in batch])

        def ours() -> None:
            with SqliteConnector(Path(directory) / f"{next(numbers)}.db") as connector:
                for at in range(0, COUNT, BATCH):
                    connector.dispatch_transactions(given[at : at + BATCH])
                assert Consume({"source": connector}).consume_transactions(policy).succeeded == COUNT

        def by_hand() -> None:
            queue(Path(directory) / f"{next(numbers)}.db", given)

        yield ratio(
            "SQLite connector, synchronous=FULL", compare(COUNT, by_hand, connector_alone), at_most=1.5
        )
        yield ratio("SQLite under the engine, batches of 100", compare(COUNT, by_hand, ours), at_most=1.5)


def queue(path: Path, given: list[Transaction]) -> None:
    """The connector's statements in its batches, with bodies encoded and decoded, and nothing else."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Transaction)
    connection = sqlite3.connect(path, isolation_level=None)
    cursor = connection.cursor()
    for statement in sql.SCHEMA:
        cursor.execute(statement)
    cursor.execute(sql.USE_WAL)
    cursor.execute(sql.USE_SYNCHRONOUS.format("FULL"))
    for at in range(0, COUNT, BATCH):
        cursor.execute(sql.BEGIN)
        now = time.time()
        cursor.executemany(sql.APPEND, [(now, encoder.encode(each)) for each in given[at : at + BATCH]])
        cursor.execute(sql.COMMIT)
    done = 0
    while True:
        cursor.execute(sql.BEGIN)
        now = time.time()
        rows = cursor.execute(sql.AVAILABLE_AGAIN, (now, BATCH)).fetchall()
        rows += cursor.execute(sql.READY, (BATCH - len(rows),)).fetchall()
        token = secrets.randbits(63)
        cursor.executemany(sql.LEASE, [(now + 60, token, row[3], row[0]) for row in rows])
        cursor.execute(sql.COMMIT)
        if not rows:
            break
        for row in rows:
            decoder.decode(row[4])
            done += 1
        cursor.execute(sql.BEGIN)
        cursor.executemany(sql.REMOVE, [(row[0], token) for row in rows])
        cursor.execute(sql.COMMIT)
    assert done == COUNT
    connection.close()
