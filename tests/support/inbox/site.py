"""The test's side of the inbox's crash tests: a database, queues, processes, and the files by which all is judged."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError

from onceward import Transaction
from onceward.connectors import DeadLetter
from onceward.inbox import Inbox
from tests.crash.inbox import worker
from tests.crash.inbox.worker import Orders, contract_of
from tests.support.site import Site, exit_code
from tests.support.wait import until

SHORT_LEASE = 0.3
"""Seconds: the lease of workers that are dead or stopped when it expires."""


class InboxSite(Site):
    def __init__(self, folder: Path, url: str, connect_args: dict[str, Any]) -> None:
        super().__init__(folder, url, connect_args)
        self.inbox = Inbox(self.engine)
        self._began = Transaction().created_at

    def set_up(self) -> None:
        self.inbox.migrate()
        for table in ("debits", "credits"):
            self.do(f"CREATE TABLE {table} (id TEXT NOT NULL, worker TEXT NOT NULL)")

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────

    def send(self, *ids: str, queue: str = "queue.db") -> None:
        """Send events. Sending an id twice makes a duplicate."""
        self.queue(queue).dispatch_transactions(
            [Transaction(id=id_, payload={"of": id_}, created_at=self._began) for id_ in ids]
        )

    def is_drained(self, queue: str = "queue.db") -> bool:
        return self.undone(queue) == 0

    def undone(self, queue: str = "queue.db") -> int:
        """How many messages the source has not seen the end of."""
        counts = self.queue(queue).counts()
        return counts["ready"] + counts["leased"] + counts["delayed"]

    def dead_letters(self, queue: str = "queue.db") -> list[DeadLetter]:
        return self.queue(queue).dead_letters()

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────

    def start(self, name: str = "worker", **orders: Any) -> ForkServerProcess:
        reported = Orders(self.folder, self.url, self.connect_args, name, **orders)
        self.inbox.register(contract_of(reported))
        return self.fork(worker.work, reported)

    def dies(self, **orders: Any) -> None:
        """Start a worker, and wait until it has killed itself."""
        settings = {"name": "doomed", "lease": SHORT_LEASE, **orders}
        assert exit_code(self.start(**settings)) == -signal.SIGKILL

    def drain(
        self, name: str = "restarted", queue: str = "queue.db", forgetting: Sequence[str] = (), **orders: Any
    ) -> None:
        """Run a healthy worker until the queue is empty and the ledger holds none of the events `forgetting`: the next
        fetch removes those that are done."""
        before = len(self.said("ready", by=name))
        process = self.start(name, queue=queue, **orders)
        # There may be nothing to do, and before it is ready it cannot be stopped as an operator does it.
        until(lambda: len(self.said("ready", by=name)) > before)
        until(lambda: self.is_drained(queue) and not any(map(self.attempts, forgetting)))
        stop(process)

    def freeze_in_handler(self, process: ForkServerProcess, *, has_database: bool = False) -> None:
        """Freeze a worker in its handler, but not while it renews a lease, because that would hold a lock.
        `has_database`: the handler holds SQLite's only lock, and must keep it."""
        while True:
            freeze(process)
            if is_free(self.folder / "queue.db") and (has_database or self._ledger_is_free()):
                return
            thaw(process)
            time.sleep(0.02)

    def _ledger_is_free(self) -> bool:
        if self.is_sqlite:
            return is_free(self.folder / "business.db")
        with suppress(OperationalError):
            return bool(self.ask("SELECT 1 FROM onceward_attempts FOR UPDATE NOWAIT"))
        return False

    # ── what came of it ─────────────────────────────────────────────────────────────────────────────────

    def go(self) -> None:
        (self.folder / "go").touch()

    def journal(self) -> list[list[str]]:
        """Lines of worker, word, and subject."""
        path = self.folder / "journal"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def said(self, word: str, *, by: str | None = None) -> list[str]:
        """What the workers, or one of them, wrote with this word."""
        lines = (line for line in self.journal() if len(line) == 3)
        return [about for name, said, about in lines if said == word and by in (None, name)]

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def reports(self) -> Counter[str]:
        """The sum of the reports of all workers that ended normally."""
        total: Counter[str] = Counter()
        for report in self.said("report"):
            total.update(json.loads(report))
        return total

    def effects(self, consumer: str = "billing") -> Counter[str]:
        """How often each event was done; all three tables must agree."""
        done = Counter(id_ for (id_,) in self.ask("SELECT id FROM debits"))
        assert done == Counter(id_ for (id_,) in self.ask("SELECT id FROM credits"))
        query = f"SELECT tracking_id FROM onceward_dedup WHERE consumer_id = '{consumer}'"
        assert set(done) == {id_ for (id_,) in self.ask(query)}
        return done

    def attempts(self, tracking_id: str) -> list[tuple[Any, ...]]:
        """Starts and ends of an event, if the ledger has it."""
        return self.ask(f"SELECT starts, ends FROM onceward_attempts WHERE tracking_id = '{tracking_id}'")

    def charges(self) -> Counter[str]:
        """How often the provider charged for each event."""
        path = self.folder / "provider"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[1] for line in lines)

    def check_nothing_is_stuck(self) -> None:
        for consumer in self.inbox.stats():
            assert (consumer["unended"], consumer["effects_in_doubt"]) == (0, 0)


def stop(*processes: ForkServerProcess) -> None:
    """Stop all workers as an operator would; they end normally."""
    for process in processes:
        process.terminate()
    assert [exit_code(process) for process in processes] == [0] * len(processes)


def freeze(*processes: ForkServerProcess) -> None:
    """Send SIGSTOP, and wait until every thread has stopped."""
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
    for process in processes:
        until(lambda pid=process.pid: is_frozen(pid))  # type: ignore[misc]


def thaw(*processes: ForkServerProcess) -> None:
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)


def is_free(database: Path) -> bool:
    """Whether a process could write to an SQLite database now."""
    with closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


def is_frozen(pid: int) -> bool:
    threads = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return bool(threads) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in threads)
