"""All places where the state of a demo can be read: queue, ledger and journal."""

from __future__ import annotations

from onceward.cli.demo.journal import JournalReader
from onceward.cli.demo.ledger import LedgerReader
from onceward.cli.demo.result import Crash, Progress
from onceward.cli.demo.setup import Setup
from onceward.connectors import DeadLetter, SqliteConnector


class Books:
    """Read by the parent while workers write."""

    def __init__(self, setup: Setup, queue: SqliteConnector) -> None:
        self.ledger = LedgerReader(setup.ledger)
        self.journal = JournalReader(setup.journal)
        self._queue = queue

    def progress(self, crash: Crash | None) -> Progress:
        counts = self._queue.counts()
        return Progress(
            applied=self.ledger.count(),
            dead=counts["dead"],
            duplicates=self.ledger.duplicates(),
            redelivered=0 if crash is None else self.journal.redelivered_after(crash.process),
            in_queue=counts["ready"] + counts["leased"] + counts["delayed"],
        )

    def dead_letters(self) -> list[DeadLetter]:
        return self._queue.dead_letters(limit=max(1, self._queue.counts()["dead"]))

    def close(self) -> None:
        self.ledger.close()
        self.journal.close()
