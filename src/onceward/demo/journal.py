"""Who was given which order, and what became of it: how the demo knows what a crash left open.

Only the demo's figures need this. The boundary has its cursor, and the balance does not look here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from onceward.connectors import Connector
from onceward.transaction import Settlement, Transaction

# Small SQLite files that several processes write to, one of which may be killed.


PATIENCE = 10.0
"""Seconds to wait for other writers."""


def create(path: Path, schema: str) -> None:
    """Make the file with these tables."""
    with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(schema)


def reader(path: Path) -> sqlite3.Connection:
    """For looking only: it waits for no writer, and no writer for it."""
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    # The first read takes a place among the file's users, and keeps it. Without one, every writer would be
    # the last to leave, and would lock the whole file to tidy it up.
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return connection


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction: all of it or nothing, even if the process is killed inside.

    Each has its own connection, so an attempt that is interrupted anywhere leaves no half-open transaction
    behind for the next. What is committed survives the process; `synchronous = FULL` would have it survive a
    power cut too, at the price of a disk flush for every order.
    """
    with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            yield connection


SCHEMA = """
CREATE TABLE deliveries (number INTEGER PRIMARY KEY, id TEXT NOT NULL, worker TEXT NOT NULL, verdict TEXT);
CREATE INDEX deliveries_by_id ON deliveries (id);
"""


class JournaledConnector:
    """A connector that writes down what goes through it. Behaves as the one inside."""

    def __init__(self, inside: Connector, path: Path, worker: str) -> None:
        self.lease = inside.lease
        self._inside = inside
        self._path = path
        self._worker = worker

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        fetched = self._inside.fetch_transactions(batch_size, **extra)
        if fetched:
            with writing(self._path) as journal:
                journal.executemany(
                    "INSERT INTO deliveries (id, worker) VALUES (?, ?)",
                    [(transaction.id, self._worker) for transaction in fetched],
                )
        return fetched

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        # Written down first: what the journal calls open is then open at the source, whenever the kill comes.
        with writing(self._path) as journal:
            journal.executemany(
                "UPDATE deliveries SET verdict = ? WHERE id = ? AND worker = ? AND verdict IS NULL",
                [(each.verdict, each.transaction.id, self._worker) for each in settlements],
            )
        self._inside.settle_transactions(settlements)

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        self._inside.dispatch_transactions(transactions)

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        self._inside.extend_transactions(transactions)

    def close(self) -> None:
        self._inside.close()


class JournalReader:
    """What the journal says, without holding anybody up."""

    def __init__(self, path: Path) -> None:
        self._journal = reader(path)

    def held_by(self, worker: str) -> set[str]:
        """The orders that were given to this worker and that it has not settled."""
        rows = self._journal.execute(
            "SELECT id FROM deliveries WHERE worker = ? AND verdict IS NULL", (worker,)
        )
        return {order for (order,) in rows}

    def came_again(self, worker: str) -> int:
        """How many orders that this worker, now dead, did not settle were given to somebody after that."""
        row = self._journal.execute(
            """
            SELECT count(DISTINCT id) FROM deliveries AS lost WHERE worker = ? AND verdict IS NULL
            AND EXISTS (SELECT 1 FROM deliveries WHERE id = lost.id AND number > lost.number)
            """,
            (worker,),
        ).fetchone()
        return int(row[0])

    def close(self) -> None:
        self._journal.close()
