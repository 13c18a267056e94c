"""Which worker got which order, and how it ended: shows the demo what a crash left open.

Only the demo's figures need this. The boundary has its cursor, and the balance does not read it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from onceward import Transaction
from onceward._files.private import create_file
from onceward.connectors import Connector
from onceward.transaction import Settlement

PATIENCE = 10.0
"""Seconds to wait for other writers."""
SCHEMA = """
CREATE TABLE deliveries (number INTEGER PRIMARY KEY, id TEXT NOT NULL, worker TEXT NOT NULL, verdict TEXT);
CREATE INDEX deliveries_by_id ON deliveries (id);
"""


class JournaledConnector:
    """A connector that records what passes through it, and otherwise behaves like the one inside."""

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
        # Recorded first, so what the journal calls open is open at the source, whenever the kill comes.
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
    """Reads the journal without blocking writers."""

    def __init__(self, path: Path) -> None:
        self._journal = reader(path)

    def held_by(self, worker: str) -> set[str]:
        """The orders that this worker got and has not settled."""
        rows = self._journal.execute(
            "SELECT id FROM deliveries WHERE worker = ? AND verdict IS NULL", (worker,)
        )
        return {order for (order,) in rows}

    def came_again(self, worker: str) -> int:
        """How many orders that a dead worker left unsettled were delivered again."""
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


# ── small SQLite files that several processes write to, one of which may be killed ──────────────────────────


def create(path: Path, schema: str) -> None:
    """Create the file with these tables."""
    create_file(path)
    with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(schema)


def reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection: it does not wait for writers, nor they for it."""
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    # The first read keeps the file in use. Otherwise every writer would be the last to close it, and would lock the
    # whole file for a checkpoint.
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return connection


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction: all or nothing, even if the process is killed inside.

    Each has its own connection, so an interrupted attempt leaves no half-open transaction for the next. Committed data
    survives the process; `synchronous = FULL` would make it survive a power cut too, at the price of a disk flush for
    every order.
    """
    with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            yield connection
