"""The embedded store: one SQLite file, one writer thread, one fsync for all that wait at the same time.

Appends and confirms queue up for the writer, which takes all there are into one transaction. Readers have a connection
of their own: in WAL mode they wait for nobody, and see only what is committed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onceward.boundary.errors import BoundaryError, ConflictingDuplicate, Unavailable
from onceward.boundary.model import Appended
from onceward.boundary.ports import Bounds, Cursor, NewFact
from onceward.boundary.stores.files import FileObjects
from onceward.boundary.wire import Record
from onceward.task.exceptions import ConfigurationError

SCHEMA_VERSION = 1
MOST_AT_ONCE = 1000
"""Writes in one transaction: those behind must not wait for ever."""
LARGEST_PAGE_BYTES = 8 * 1024 * 1024

SCHEMA = (
    """
    CREATE TABLE facts (
        "offset" INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL UNIQUE,
        digest BLOB NOT NULL,
        record BLOB NOT NULL,
        appended_at INTEGER NOT NULL
    )
    """,
    "CREATE TABLE cursors (name TEXT PRIMARY KEY, position INTEGER NOT NULL, confirmed_at INTEGER) WITHOUT ROWID",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
INSERT = 'INSERT INTO facts ("offset", message_id, digest, record, appended_at) VALUES (?, ?, ?, ?, ?)'
FIND = 'SELECT "offset", digest FROM facts WHERE message_id = ?'
READ = 'SELECT "offset", record, appended_at FROM facts WHERE "offset" > ? ORDER BY "offset" LIMIT ?'
BOUNDS = """
    SELECT coalesce((SELECT min("offset") FROM facts), 1), coalesce((SELECT max("offset") FROM facts), 0)
"""  # as two queries, for each of which SQLite goes to one end of the index
POSITION = "SELECT position FROM cursors WHERE name = ?"
CREATE_CURSOR = "INSERT INTO cursors (name, position) VALUES (?, 0) ON CONFLICT DO NOTHING"
ADVANCE = """
    INSERT INTO cursors (name, position, confirmed_at) VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET
        position = excluded.position, confirmed_at = excluded.confirmed_at WHERE excluded.position > cursors.position
"""
CURSORS = "SELECT name, position, confirmed_at FROM cursors ORDER BY name"


class Write:
    """Something for the writer, and who waits for it."""

    __slots__ = ("done", "fact", "loop", "operation", "outcome")

    def __init__(self, fact: NewFact | None, operation: Callable[[sqlite3.Cursor], Any] | None) -> None:
        self.fact = fact
        self.operation = operation
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self.loop.create_future()
        self.outcome: Any = None


class SqliteStore:
    """A `Store` in one directory. A second one on the same directory is refused while the first is open."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = _prepared(Path(directory))
        self._lock = _locked(self.directory)
        path = self.directory / "boundary.db"
        try:
            self._writing = _connected(path)
            self._reading = _connected(path)
            self._last = self._writing.execute(BOUNDS).fetchone()[1]
        except sqlite3.Error as error:
            self._lock.close()
            raise ConfigurationError(f"{path} cannot be opened as a boundary's log: {error}") from error
        self.objects = FileObjects(self.directory / "objects")
        self._writes: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="onceward-boundary-writer", daemon=True)
        self._writer.start()
        self._closed = False

    # ── facts ───────────────────────────────────────────────────────────────────────────────────────────

    async def append(self, fact: NewFact) -> Appended:
        appended: Appended = await self._through_writer(Write(fact, None))
        return appended

    async def read(self, after: int, limit: int) -> list[Record]:
        try:
            records: list[Record] = []
            size = 0
            for each in self._reading.execute(READ, (after, limit)):
                size += len(each[1])
                if records and size > LARGEST_PAGE_BYTES:
                    break
                records.append(each)
            return records
        except sqlite3.Error as error:
            raise Unavailable(f"the log cannot be read: {error}") from error

    async def bounds(self) -> Bounds:
        return Bounds(*self._reading.execute(BOUNDS).fetchone())

    # ── cursors ─────────────────────────────────────────────────────────────────────────────────────────

    async def position(self, name: str, *, create: bool) -> int | None:
        row = self._reading.execute(POSITION, (name,)).fetchone()
        if row is not None:
            return int(row[0])
        if not create:
            return None
        await self._through_writer(Write(None, lambda cursor: cursor.execute(CREATE_CURSOR, (name,))))
        return 0

    async def advance(self, name: str, offset: int) -> int:
        def advance(cursor: sqlite3.Cursor) -> int:
            cursor.execute(ADVANCE, (name, offset, _now()))
            return int(cursor.execute(POSITION, (name,)).fetchone()[0])

        position: int = await self._through_writer(Write(None, advance))
        return position

    async def cursors(self) -> list[Cursor]:
        return [Cursor(*row) for row in self._reading.execute(CURSORS)]

    async def close(self) -> None:
        """Let the writer end what it has, and let go of the directory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._writes.put(None)
        await asyncio.to_thread(self._writer.join)
        self._writing.close()
        self._reading.close()
        self._lock.close()

    # ── the writer ──────────────────────────────────────────────────────────────────────────────────────

    async def _through_writer(self, write: Write) -> Any:
        if self._closed:
            raise Unavailable("this boundary is closing")
        self._writes.put(write)
        # A caller who goes away does not undo what is being written.
        return await asyncio.shield(write.done)

    def _write(self) -> None:
        while True:
            writes = [self._writes.get()]
            while len(writes) < MOST_AT_ONCE:
                try:
                    writes.append(self._writes.get_nowait())
                except queue.Empty:
                    break
            todo = [write for write in writes if write is not None]
            if todo:
                self._commit(todo)
                _tell(todo)
            if len(todo) < len(writes):
                return

    def _commit(self, writes: list[Write]) -> None:
        cursor = self._writing.cursor()
        last = self._last
        try:
            cursor.execute("BEGIN IMMEDIATE")
            self._append_all(cursor, [write for write in writes if write.fact is not None])
            for write in writes:
                if write.operation is not None:
                    write.outcome = write.operation(cursor)
            cursor.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            # Nothing of it is written, whatever it was: a full disk, a read-only directory, an I/O error.
            self._last = last
            _roll_back(cursor)
            for write in writes:
                write.outcome = Unavailable(f"nothing was written: {error}; try again")

    def _append_all(self, cursor: sqlite3.Cursor, appends: list[Write]) -> None:
        """All at once, as a rule; one by one if an id is known or comes twice."""
        if not appends:
            return
        now = _now()
        rows = [
            (self._last + number, write.fact.message_id, write.fact.digest, write.fact.record, now)  # type: ignore[union-attr]
            for number, write in enumerate(appends, 1)
        ]
        cursor.execute("SAVEPOINT appends")
        try:
            cursor.executemany(INSERT, rows)
        except sqlite3.IntegrityError:
            cursor.execute("ROLLBACK TO appends")
            for write in appends:
                write.outcome = self._append_one(cursor, write.fact, now)  # type: ignore[arg-type]
        else:
            for row, write in zip(rows, appends, strict=True):
                write.outcome = Appended(row[0])
            self._last += len(rows)
        cursor.execute("RELEASE appends")

    def _append_one(self, cursor: sqlite3.Cursor, fact: NewFact, now: int) -> Appended | BoundaryError:
        known = cursor.execute(FIND, (fact.message_id,)).fetchone()
        if known is None:
            self._last += 1
            cursor.execute(INSERT, (self._last, fact.message_id, fact.digest, fact.record, now))
            return Appended(self._last)
        offset, digest = known
        return (
            Appended(offset, duplicate=True)
            if digest == fact.digest
            else ConflictingDuplicate(fact.message_id, offset)
        )


def _tell(writes: list[Write]) -> None:
    """Wake those who wait, with one call to each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Write]] = {}
    for write in writes:
        by_loop.setdefault(write.loop, []).append(write)
    for loop, waiting in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, waiting)
        except RuntimeError:  # its loop is closed: nobody waits any more
            continue


def _resolve(writes: list[Write]) -> None:
    for write in writes:
        if write.done.done():
            continue
        if isinstance(write.outcome, BoundaryError):
            write.done.set_exception(write.outcome)
            write.done.exception()  # whoever went away does not want to hear of it
        else:
            write.done.set_result(write.outcome)


def _prepared(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the data directory {directory} cannot be made: {error}") from error
    return directory.absolute()


def _locked(directory: Path) -> Any:
    """Two servers on one directory would give out the same offsets twice."""
    try:
        lock = (directory / "lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(
            f"another server uses {directory}; give this one a directory of its own, or stop the other"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be used as a data directory: {error}") from error
    return lock


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("COMMIT")
    elif version > SCHEMA_VERSION:
        raise ConfigurationError(
            f"{path} was written by a newer onceward (schema {version}, this one knows {SCHEMA_VERSION})"
        )
    return connection


def _roll_back(cursor: sqlite3.Cursor) -> None:
    if cursor.connection.in_transaction:
        cursor.execute("ROLLBACK")


def _now() -> int:
    return time.time_ns() // 1_000_000
