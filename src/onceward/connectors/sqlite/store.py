"""The rows of a leasing queue, in one SQLite file: the connection to it, one transaction at a time, and forks."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from threading import RLock
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakSet

from onceward._files.identity import OpenFile, companions_of
from onceward._files.private import create_file
from onceward._time import boot_id, uptime
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.file_place import resolve
from onceward.connectors.identities import identity_in, identity_of, pack, summarize
from onceward.connectors.lease_rules import BurialReason, DeadMessage, read_dead_message
from onceward.connectors.leased_deliveries import Held
from onceward.connectors.leases import AvailableRow
from onceward.connectors.sqlite import statements as sql
from onceward.connectors.sqlite.lines import SqliteLines
from onceward.errors import ConfigurationError, OncewardError
from onceward.task.exceptions import ExceptionCategory
from onceward.transaction import Transaction

Values = TypeVar("Values", bound=tuple[Any, ...])
Synchronous = Literal["OFF", "NORMAL", "FULL", "EXTRA"]

OPEN_WAIT = 10.0
"""Seconds to wait for processes that are opening, creating or recovering the same file."""
POLL = 0.01
"""Seconds SQLite itself waits for another writer. Its own waits grow to 0.1 s and are unfair under load;
retrying soon gives every process its turn."""


class DatabaseBusyError(OncewardError, TimeoutError):
    """Other processes kept the queue file locked for too long. Nothing was changed."""


class QueueCursor(sqlite3.Cursor):
    """Executes the statements of `statements` for one queue."""

    queue: str | None = None

    def execute(self, statement: str, values: Any = (), /) -> QueueCursor:
        super().execute(sql.named(statement, self.queue), values)
        return self

    def executemany(self, statement: str, rows: Any, /) -> QueueCursor:
        super().executemany(sql.named(statement, self.queue), rows)
        return self


class Database:
    """A connection that threads share behind one lock, never carried across a fork: see the end of this file."""

    def __init__(
        self, path: str | os.PathLike[str], synchronous: Synchronous, queue: str | None = None
    ) -> None:
        if synchronous not in get_args(Synchronous):
            raise ConfigurationError(
                f"synchronous must be one of {', '.join(get_args(Synchronous))}, not {synchronous!r}"
            )
        self.path = resolve(path)
        self.queue = queue
        """The name of the queue, in a file that is shared; None for a file of its own."""
        self._synchronous = synchronous
        self.lock = RLock()
        self._closed = False
        self._file: OpenFile | None = None
        """The queue's file, from the first time that it was opened on."""
        self._files: tuple[OpenFile, ...] = ()
        """That and, from its first transaction on, the files beside it that this connection has open."""
        self.cursor = self._open()
        """The cursor of the current transaction."""
        self._connected = True
        _open_databases.add(self)

    @contextmanager
    def transaction(self, wait: float) -> Iterator[None]:
        """Run a write transaction: one at a time across all processes, all or none, durable at its end.

        Raises `FileLostError`, also at its end, if the file was deleted or replaced.
        """
        with self.lock:
            cursor = self._take_cursor()
            self._execute_when_unlocked(cursor, sql.BEGIN, wait)
            try:
                if len(self._files) == 1:
                    self._files += (*companions_of(self.path),)
                yield
                cursor.execute(sql.COMMIT)
            except BaseException:
                self._forget()
                _roll_back(cursor)
                raise
            self._check_files()  # they may have been deleted meanwhile: then this was written to nowhere

    def _take_cursor(self) -> sqlite3.Cursor:
        """Return the cursor for a transaction, outside of any."""
        if self._closed:
            raise ConnectorClosedError(
                f"the connector to {self.path} is closed; create a new one to continue"
            )
        if self._connected:
            self._check_files()
        else:
            self.cursor = self._open()
            self._forget()
            self._connected = True
        cursor = self.cursor
        if cursor.connection.in_transaction:  # left over when an interrupt came between BEGIN and try
            cursor.execute(sql.ROLLBACK)
        return cursor

    def _check_files(self) -> None:
        for each in self._files:
            each.check()

    def _forget(self) -> None:
        """Forget what was read: the connection is another, or the transaction did not happen."""

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self.disconnect()
            _open_databases.discard(self)

    def disconnect(self) -> None:
        """Close the connection; the next transaction opens another."""
        if self._connected:
            self.cursor.connection.close()
            self._connected = False

    def _execute_when_unlocked(
        self, cursor: sqlite3.Cursor, statement: str, wait: float, pause: float = 0.0, values: Any = ()
    ) -> None:
        """Execute it once no other process holds the lock. `pause` is for statements that do not wait themselves."""
        deadline = time.monotonic() + wait
        while True:
            try:
                cursor.execute(statement, values)
                return
            except sqlite3.OperationalError as error:
                # The low byte is the primary code: BUSY has variants for recovery and for snapshots.
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
            if time.monotonic() >= deadline:
                raise DatabaseBusyError(
                    f"other processes kept {self.path} locked for {wait:g} s; nothing was changed"
                )
            if pause:
                time.sleep(pause)

    def _open(self) -> sqlite3.Cursor:
        if self._file is not None:
            self._file.check()  # or there would be another
        create_file(self.path)
        connection = sqlite3.connect(self.path, timeout=POLL, isolation_level=None, check_same_thread=False)
        connection.text_factory = _text_of
        try:
            cursor = connection.cursor(QueueCursor)
            cursor.queue = self.queue
            self._prepare(cursor)
        except sqlite3.DatabaseError as error:
            connection.close()
            raise ConfigurationError(
                f"{self.path} cannot be opened as a queue: {error}; "
                "use a path in a writable directory, to a new file or one that this connector created"
            ) from error
        except BaseException:
            connection.close()
            raise
        self._file = self._file or OpenFile(self.path, hold=True)
        self._files = (self._file,)
        return cursor

    def _prepare(self, cursor: sqlite3.Cursor) -> None:
        # The first read also recovers after a crash.
        self._execute_when_unlocked(cursor, sql.READ_USER_VERSION, OPEN_WAIT, POLL)
        self._execute_when_unlocked(cursor, sql.BEGIN, OPEN_WAIT)
        try:
            self._check_or_create(cursor)
            cursor.execute(sql.COMMIT)
        except BaseException:
            _roll_back(cursor)
            raise
        self._execute_when_unlocked(cursor, sql.USE_WAL, OPEN_WAIT, POLL)
        if cursor.fetchone()[0] != "wal":
            raise ConfigurationError(
                f"{self.path} is on a file system without shared memory, which SQLite needs to share it between "
                "processes; put it on a local disk"
            )
        cursor.execute(sql.USE_SYNCHRONOUS.format(self._synchronous))

    def _check_or_create(self, cursor: sqlite3.Cursor) -> None:
        if self.queue is not None:
            self._check_or_create_named(cursor, self.queue)
            return
        if cursor.execute(sql.READ_IS_EMPTY).fetchone()[0]:
            for statement in sql.SCHEMA:
                cursor.execute(statement)
            return
        if cursor.execute(sql.READ_APPLICATION_ID).fetchone()[0] != sql.APPLICATION_ID:
            raise ConfigurationError(
                f"{self.path} is a database of another program; use a separate file for the queue, or, if it is your "
                f"application's database, name a queue in it: sqlite:///{self.path.name}?queue=orders"
            )
        self._upgrade(cursor, cursor.execute(sql.READ_USER_VERSION).fetchone()[0])

    def _check_or_create_named(self, cursor: sqlite3.Cursor, queue: str) -> None:
        if cursor.execute(sql.READ_APPLICATION_ID).fetchone()[0] == sql.APPLICATION_ID:
            raise ConfigurationError(
                f"{self.path} is one queue as a whole, and has no queue {queue!r} in it; remove queue= from the "
                "source, or name your application's database"
            )
        cursor.execute(sql.QUEUES)
        known = cursor.execute(sql.READ_QUEUE_VERSION, (queue,)).fetchone()
        if known is None:
            for statement in sql.SCHEMA:
                if not statement.startswith("PRAGMA"):  # they are the application's
                    cursor.execute(statement)
            cursor.execute(sql.ADD_QUEUE, (queue, sql.SCHEMA_VERSION))
        elif self._upgrade(cursor, known[0]):
            cursor.execute(sql.SET_QUEUE_VERSION, (sql.SCHEMA_VERSION, queue))

    def _upgrade(self, cursor: sqlite3.Cursor, version: int) -> bool:
        """Bring the tables to the current version. Return whether they were older."""
        if version > sql.SCHEMA_VERSION:
            raise ConfigurationError(
                f"{self.path} was written by a newer onceward (schema {version}; this one supports up to "
                f"{sql.SCHEMA_VERSION}); upgrade onceward"
            )
        for older in range(version, sql.SCHEMA_VERSION):
            for statement in sql.UPGRADES[older]:
                if self.queue is None or not statement.startswith("PRAGMA"):
                    cursor.execute(statement)
        return version < sql.SCHEMA_VERSION


class SqliteLeaseStore(SqliteLines, Database):
    """A `LeaseStore` in one file. `statements` has the SQL."""

    _ahead: float | None = None
    _entrance: sqlite3.Cursor | None = None
    """The cursor whose connection has `statements.ENTRANCE`."""

    def now(self) -> float:
        if not boot_id():
            return time.time()
        if self._ahead is None:
            self._ahead = self._begin_clock()
        return uptime() + self._ahead

    def _forget(self) -> None:
        self._ahead = None

    def _begin_clock(self) -> float:
        """Return how far the clock of the queue is ahead of `uptime`; see `statements.CLOCK`."""
        known = self.cursor.execute(sql.READ_CLOCK).fetchone()
        if known is not None and known[0] == boot_id():
            return float(known[1])
        wall = time.time()
        ahead = wall - uptime()
        self.cursor.execute(sql.BEGIN_CLOCK, (boot_id(), ahead, wall))
        if known is not None:
            self.cursor.execute(sql.END_LEASES, {"now": wall})
            if wall < known[2]:  # then it says nothing about how long a delay has lasted
                self.cursor.execute(sql.END_DELAYS, {"now": wall})
        return ahead

    def append(self, bodies: Sequence[bytes], now: float) -> None:
        cursor = self.cursor
        cursor.executemany(sql.APPEND, [(now, body) for body in bodies])
        cursor.execute(sql.COUNT_APPENDED, (len(bodies),))

    def append_alone(self, bodies: Sequence[bytes], now: float, wait: float) -> bool:
        """Append one message in one statement, which is a transaction of its own. False if there are more, or if this
        is the first transaction of its connection."""
        if len(bodies) != 1:
            return False
        with self.lock:
            cursor = self._take_cursor()
            if len(self._files) == 1:
                return False
            if self._entrance is not cursor:
                for statement in sql.ENTRANCE:
                    self._execute_when_unlocked(cursor, statement, wait)
                self._entrance = cursor
            self._execute_when_unlocked(cursor, sql.APPEND_ALONE, wait, values=(now, bodies[0]))
            self._check_files()  # as at the end of every transaction
        return True

    def due(self) -> float | None:
        due: float | None = self.cursor.execute(sql.DUE).fetchone()[0]
        return due

    def available(self, now: float, limit: int) -> Sequence[AvailableRow]:
        cursor = self.cursor
        again, ready = sql.AVAILABLE_AGAIN, sql.READY
        if self._in_lines:
            again, ready = sql.FIRST_AGAIN, sql.FIRST_READY
        rows: list[AvailableRow] = cursor.execute(again, (now, limit)).fetchall()
        if len(rows) < limit:
            rows += cursor.execute(ready, (limit - len(rows),)).fetchall()
        if len(rows) < limit:
            rows += cursor.execute(sql.STRANDED, (limit - len(rows),)).fetchall()
        return rows

    def lease(self, rows: Sequence[AvailableRow], token: int, until: float) -> None:
        self.cursor.executemany(sql.LEASE, [(until, token, row[2] + 1, row[3], row[0]) for row in rows])
        if self.queue is not None:  # messages leave it in other transactions, which have no time for this
            self._forget_oldest()

    def extend(self, deliveries: Sequence[Held], until: float) -> Sequence[Held]:
        missed = self._execute_all(sql.EXTEND, [(until, *held) for held in deliveries])
        return [(key, token) for _, key, token in missed]

    def release(self, first: int, last: int, now: float) -> int:
        """End the leases of all deliveries whose token is in this range. Return how many."""
        values = {"now": now, "first": first, "last": last}
        return self.cursor.execute(sql.RELEASE, values).rowcount

    def remove(self, deliveries: Sequence[Held], transactions: Sequence[Transaction]) -> Sequence[Held]:
        missed = (
            self.remove_first(deliveries) if self._in_lines else self._execute_all(sql.REMOVE, deliveries)
        )
        if missed:
            pairs = zip(deliveries, transactions, strict=True)
            transactions = [transaction for held, transaction in pairs if held not in missed]
        if transactions:
            self.cursor.execute(sql.COUNT_DONE, (len(transactions),))
            self.cursor.execute(sql.NOTE_DONE, (pack(map(identity_of, transactions)),))
            self._forget_oldest()
        return missed

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        return self._change_one(sql.GIVE_BACK, visible_at, key, token)

    def hasten(self, key: int) -> None:
        self._change_one(sql.HASTEN, key)

    def delay(
        self,
        key: int,
        token: int,
        until: float,
        category: ExceptionCategory | None,
        error: str | None,
        history: str,
    ) -> bool:
        return self._change_one(sql.DELAY, until, category, error, history, key, token)

    def bury(
        self,
        key: int,
        token: int | None,
        now: float,
        reason: BurialReason,
        transaction_id: str | None,
        category: ExceptionCategory | None = None,
        error: str | None = None,
        history: str = "",
    ) -> bool:
        values = (transaction_id, reason, category, error, now, history, key, token)
        copied = self.cursor.execute(sql.COPY_TO_DEAD_LETTERS, values)
        if self._holds_lines and copied.rowcount == 1:
            self.cursor.execute(sql.HOLD_LINE, (copied.lastrowid, key))
        return self.cursor.execute(sql.REMOVE, (key, token)).rowcount == 1

    def counts(self, now: float) -> dict[str, int]:
        counts = self.cursor.execute(sql.COUNTS, {"now": now}).fetchone()
        return dict(zip(("ready", "leased", "delayed", "dead"), counts, strict=True))

    def dead(self, limit: int) -> list[DeadMessage]:
        rows = self.cursor.execute(sql.DEAD_LETTERS, (limit,))
        return [read_dead_message((row[0], row[8]), *row[1:]) for row in rows]

    def forget_dead(self, keys: Sequence[tuple[int, float]]) -> None:
        if found := self._take_dead(keys):
            self.cursor.execute(sql.COUNT_MOVED, (len(found),))
            moved = [(pack([identity_in(body)]), at, sha256(body).digest()) for at, body in found]
            self.cursor.executemany(sql.NOTE_MOVED, moved)
            self._forget_oldest()

    def acknowledge_dead(self, keys: Sequence[tuple[int, float]]) -> None:
        if found := self._take_dead(keys):
            self.cursor.execute(sql.COUNT_DONE, (len(found),))
            self.cursor.execute(sql.NOTE_DONE, (pack(identity_in(body) for _, body in found),))
            self._forget_oldest()

    def _take_dead(self, keys: Sequence[tuple[int, float]]) -> list[tuple[float, bytes]]:
        """Remove them. Return those that had not been removed before."""
        cursor = self.cursor
        found = [row for key in dict.fromkeys(keys) for row in cursor.execute(sql.DEAD_LETTER, key)]
        cursor.executemany(sql.FORGET_DEAD, keys)
        return found

    def _forget_oldest(self) -> None:
        """Forget the oldest ids beyond those that are kept. Their numbers remain."""
        cursor = self.cursor
        while row := cursor.execute(sql.TO_FORGET, (sql.KEPT,)).fetchone():
            cursor.execute(sql.FORGET, (row[0],))
            cursor.execute(sql.COUNT_FORGOTTEN, summarize(row[1]))

    def _execute_all(self, statement: str, rows: Sequence[Values]) -> Sequence[Values]:
        """Execute it for all rows at once. Return the rows that changed nothing; usually there are none, so they
        are searched for only if the count is short."""
        if not rows:
            return ()
        cursor = self.cursor
        cursor.execute(sql.SAVEPOINT)
        if cursor.executemany(statement, rows).rowcount == len(rows):
            cursor.execute(sql.KEEP_SAVEPOINT)
            return ()
        cursor.execute(sql.UNDO_SAVEPOINT)
        return [row for row in rows if not self._change_one(statement, *row)]

    def _change_one(self, statement: str, *values: object) -> bool:
        return self.cursor.execute(statement, values).rowcount == 1


def _text_of(stored: bytes) -> str:
    return stored.decode("utf-8", "backslashreplace")  # another program may have stored any bytes as text


def _roll_back(cursor: sqlite3.Cursor) -> None:
    if cursor.connection.in_transaction:
        cursor.execute(sql.ROLLBACK)


# Carrying a connection across a fork corrupts the locking of the file, even if the child only closes it. So it
# is closed before a fork, and parent and child each open their own when they next need one. The lock is held
# meanwhile: no transaction is cut in half, and both release it after the fork.

_open_databases: WeakSet[Database] = WeakSet()
_forking: list[Database] = []


def _before_fork() -> None:
    for database in list(_open_databases):
        database.lock.acquire()
        _forking.append(database)
        database.disconnect()


def _after_fork() -> None:
    while _forking:
        _forking.pop().lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
