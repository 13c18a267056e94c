"""A SQLite file as a queue has it open: one connection, one transaction at a time, and forks."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Literal, get_args
from weakref import WeakSet

from onceward._files.identity import OpenFile, companions_of
from onceward._files.private import create_file
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.file_place import resolve
from onceward.connectors.sqlite import statements as sql
from onceward.errors import ConfigurationError, OncewardError

Synchronous = Literal["OFF", "NORMAL", "FULL", "EXTRA"]

OPEN_WAIT = 10.0
"""Seconds to wait for processes that are opening, creating or recovering the same file."""
POLL = 0.01
"""Seconds SQLite itself waits for another writer. Its own waits grow to 0.1 s and are unfair under load;
retrying soon gives every process its turn."""


CONTENTS = 2
"""The database and its log have messages; the third file is for locks."""


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
        self._contents: tuple[OpenFile, ...] = ()
        """Those of them that have messages. One that was emptied or cut is to be noticed before it is written to: then
        it has its size again."""
        with _opening:
            self.cursor: sqlite3.Cursor = self._open()
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
                    self._contents = self._files[:CONTENTS]
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
            for each in self._contents:
                each.check()
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
        self._files = self._contents = (self._file,)
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


def _text_of(stored: bytes) -> str:
    return stored.decode("utf-8", "backslashreplace")  # another program may have stored any bytes as text


def _roll_back(cursor: sqlite3.Cursor) -> None:
    if cursor.connection.in_transaction:
        cursor.execute(sql.ROLLBACK)


# Carrying a connection across a fork corrupts the locking of the file, even if the child only closes it. So it
# is closed before a fork, and parent and child each open their own when they next need one. The lock is held
# meanwhile: no transaction is cut in half, and both release it after the fork.

_open_databases: WeakSet[Database] = WeakSet()
_opening = RLock()
"""Held while one is opened for the first time, when it is not among them yet."""
_forking: list[Database] = []


def _before_fork() -> None:
    _opening.acquire()
    for database in list(_open_databases):
        database.lock.acquire()
        _forking.append(database)
        database.disconnect()


def _after_fork() -> None:
    while _forking:
        _forking.pop().lock.release()
    _opening.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
