"""Real processes for the crash tests of the SQLite queue, which are really killed.

Run as `python sqlite_processes.py <what> <path> <seconds>`. The process's clock is ahead by <seconds>, so a test can be
past a lease without waiting for it. Output is one word per line.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
import time
from typing import Any, NoReturn

from onceward.connectors import SqliteConnector
from onceward.connectors.sqlite import statements
from onceward.connectors.sqlite.database import Database
from onceward.connectors.sqlite.store import SqliteLeaseStore
from onceward.transaction import Settlement, Transaction, Verdict

LEASE = 60.0
DISPATCH = 500


def connect(path: str, ahead: float = 0.0, lease: float = LEASE) -> SqliteConnector:
    return SqliteConnector(
        path, lease=lease, max_deliveries=3, on_failure="dead_letter", clock=lambda: time.time() + ahead
    )


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def fetch_and_hang(queue: SqliteConnector) -> None:
    fetched = queue.fetch_transactions(10)
    for transaction in fetched:
        say(transaction.payload)
    signal.pause()


def consume(queue: SqliteConnector) -> None:
    """Consume until nothing is available. Poison kills the process."""
    while batch := queue.fetch_transactions(5):
        if any(transaction.payload == "poison" for transaction in batch):
            die()
        queue.settle_transactions([Settlement(transaction, Verdict.DONE) for transaction in batch])
        for transaction in batch:
            say(transaction.payload)


def dispatch_for_ever(queue: SqliteConnector) -> None:
    number = 0
    while True:
        queue.dispatch_transactions([Transaction(payload=number)] * DISPATCH)
        say(number)
        number += 1


def die_before_the_commit_of_a_dispatch(queue: SqliteConnector) -> None:
    real = SqliteLeaseStore.append

    def append(self: SqliteLeaseStore, *args: object) -> None:
        real(self, *args)  # type: ignore[arg-type]
        die()

    SqliteLeaseStore.append = append  # type: ignore[method-assign]
    queue.dispatch_transactions([Transaction()] * DISPATCH)


def die_between_copy_and_removal_of_a_burial(queue: SqliteConnector) -> None:
    fetched = queue.fetch_transactions(1)
    removal = statements.REMOVE.partition("?")[0]
    database: sqlite3.Connection = queue._store.cursor.connection  # type: ignore[attr-defined]
    database.set_trace_callback(lambda statement: die() if statement.startswith(removal) else None)
    queue.settle_transactions([Settlement(t, Verdict.FAILED) for t in fetched])


def fork_and_share(queue: SqliteConnector) -> None:
    """Parent and child both use the connector that the parent opened."""
    queue.dispatch_transactions([Transaction(payload=number) for number in range(200)])
    fetched = queue.fetch_transactions(1)
    child = os.fork()
    queue.settle_transactions([Settlement(transaction, Verdict.DONE) for transaction in fetched if child])
    consume(queue)
    if child:
        for transaction in fetched:
            say(transaction.payload)
        queue.close()
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))


def fork_while_a_thread_opens(queue: SqliteConnector) -> None:
    """A thread of the parent is opening the same file, and has locked it."""
    holds = threading.Event()
    execute = Database._execute_when_unlocked

    def slow(self: Database, cursor: sqlite3.Cursor, statement: str, *more: Any) -> None:
        execute(self, cursor, statement, *more)
        if statement == statements.BEGIN and threading.current_thread() is thread:
            holds.set()
            time.sleep(0.3)

    Database._execute_when_unlocked = slow  # type: ignore[assignment]
    path = queue._rows.path
    thread = threading.Thread(target=lambda: connect(str(path)).close())
    thread.start()
    assert holds.wait(20)
    child = os.fork()
    queue.dispatch_transactions([Transaction(payload="parent" if child else "child")])
    if child:
        _, status = os.waitpid(child, 0)
        thread.join()
        consume(queue)
        sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    what, path, ahead = sys.argv[1:]
    with connect(path, float(ahead)) as opened:
        globals()[what](opened)
