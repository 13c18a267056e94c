"""Who was given which message, and what became of it: how the demo knows what a crash left open.

Only the demo's figures need this. The queue keeps its own count, and the balance does not look here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onceward.cli.demo import files
from onceward.cli.demo.orders import message_number
from onceward.connectors import Connector
from onceward.settlement import Settlement, Verdict
from onceward.transaction import Transaction

SCHEMA = """
CREATE TABLE IF NOT EXISTS deliveries (
    number INTEGER PRIMARY KEY, message INTEGER NOT NULL, worker TEXT NOT NULL, verdict TEXT
);
CREATE INDEX IF NOT EXISTS deliveries_by_message ON deliveries (message);
"""


class JournaledConnector:
    """A connector that writes down what goes through it. Behaves as the one inside."""

    def __init__(self, inside: Connector, path: Path, worker: str) -> None:
        self.lease = inside.lease
        self._inside = inside
        self._path = path
        self._worker = worker
        files.create(path, SCHEMA)

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        fetched = self._inside.fetch_transactions(batch_size, **extra)
        if fetched:
            with files.writing(self._path) as journal:
                journal.executemany(
                    "INSERT INTO deliveries (message, worker) VALUES (?, ?)",
                    [(message_number(transaction), self._worker) for transaction in fetched],
                )
        return fetched

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        # Written down first: what the journal calls open is then open in the queue, whenever the kill comes.
        with files.writing(self._path) as journal:
            journal.executemany(
                "UPDATE deliveries SET verdict = ? WHERE message = ? AND worker = ? AND verdict IS NULL",
                [(each.verdict, message_number(each.transaction), self._worker) for each in settlements],
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
        files.create(path, SCHEMA)
        self._journal = files.reader(path)

    def held_by(self, worker: str) -> set[int]:
        """The messages that were given to this worker and that it has not settled."""
        rows = self._journal.execute(
            "SELECT message FROM deliveries WHERE worker = ? AND verdict IS NULL", (worker,)
        )
        return {message for (message,) in rows}

    def redelivered_after(self, worker: str) -> int:
        """How many messages that this worker, now dead, did not bring to an end were delivered again.

        One that it reported as failed is not among them: that would have come again without the crash.
        """
        row = self._journal.execute(
            """
            SELECT count(DISTINCT message) FROM deliveries AS lost
            WHERE worker = ? AND coalesce(verdict, ?) = ?
            AND EXISTS (SELECT 1 FROM deliveries WHERE message = lost.message AND number > lost.number)
            """,
            (worker, Verdict.DONE, Verdict.DONE),
        ).fetchone()
        number: int = row[0]
        return number

    def close(self) -> None:
        self._journal.close()
