"""The embedded store: one SQLite file, one writer thread, one fsync for all concurrent writes.

Appends and confirms queue up for the writer, which puts all of them into one transaction. Readers have their own
connection: in WAL mode they never wait, and see only what is committed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from onceward.boundary.errors import BoundaryError, ConflictingDuplicate, Unavailable
from onceward.boundary.model import Appended
from onceward.boundary.store import Bounds, Cursor, NewFact
from onceward.boundary.stores.files import FileObjects
from onceward.boundary.wire import Record
from onceward.errors import ConfigurationError

SCHEMA_VERSION = 1
MOST_AT_ONCE = 1000
"""Writes in one transaction: later ones must not wait forever."""
MOST_REMOVED = 2000
"""Facts in one step of expiry: appends must not wait for all of it."""
LARGEST_PAGE_BYTES = 8 * 1024 * 1024

SCHEMA = (
    """
    CREATE TABLE facts (
        "offset" INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL UNIQUE,
        digest BLOB NOT NULL,
        record BLOB NOT NULL,
        stream TEXT NOT NULL,
        appended_at INTEGER NOT NULL
    )
    """,
    "CREATE INDEX facts_by_age ON facts (stream, appended_at)",
    "CREATE TABLE removed (through INTEGER NOT NULL)",
    "INSERT INTO removed VALUES (0)",
    "CREATE TABLE cursors (name TEXT PRIMARY KEY, position INTEGER NOT NULL, confirmed_at INTEGER) WITHOUT ROWID",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
INSERT = (
    'INSERT INTO facts ("offset", message_id, digest, record, stream, appended_at) VALUES (?, ?, ?, ?, ?, ?)'
)
MORE = ", (?, ?, ?, ?, ?, ?)"
FIND = 'SELECT "offset", digest FROM facts WHERE message_id = ?'
READ = 'SELECT "offset", record, appended_at FROM facts WHERE "offset" > ? ORDER BY "offset" LIMIT ?'
BOUNDS = """
    SELECT (SELECT min("offset") FROM facts), (SELECT max("offset") FROM facts), (SELECT through FROM removed)
"""  # as separate queries, for each of which SQLite reads one end of the index
EXPIRE = """
    DELETE FROM facts WHERE "offset" IN
        (SELECT "offset" FROM facts WHERE stream = ? AND appended_at < ? LIMIT ?) RETURNING "offset"
"""
DROP = """
    DELETE FROM facts WHERE "offset" IN
        (SELECT "offset" FROM facts WHERE "offset" <= ? ORDER BY "offset" LIMIT ?) RETURNING "offset"
"""
REMOVED = "UPDATE removed SET through = max(through, ?)"
POSITION = "SELECT position FROM cursors WHERE name = ?"
CREATE_CURSOR = "INSERT INTO cursors (name, position) VALUES (?, 0) ON CONFLICT DO NOTHING"
ADVANCE = """
    INSERT INTO cursors (name, position, confirmed_at) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET
        position = excluded.position, confirmed_at = excluded.confirmed_at WHERE excluded.position > cursors.position
"""
CURSORS = "SELECT name, position, confirmed_at FROM cursors ORDER BY name"


class Write:
    """A job for the writer, and the future of its caller."""

    __slots__ = ("done", "fact", "operation", "outcome")

    def __init__(self, fact: NewFact | None, operation: Callable[[sqlite3.Cursor], Any] | None) -> None:
        self.fact = fact
        self.operation = operation
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.outcome: Any = None


class SqliteBoundaryStore:
    """A `BoundaryStore` in one directory, for one event loop. Refuses a directory that another process has open."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = _prepare(Path(directory))
        path = self.directory / "boundary.db"
        with ExitStack() as opening:
            opening.enter_context(_lock(self.directory))
            try:
                self._writing = opening.enter_context(closing(_connect(path)))
                self._reading = opening.enter_context(closing(_connect(path)))
                self._last = bounds_of(self._writing).last
                self.objects = FileObjects(self.directory / "objects")
            except (sqlite3.Error, OSError) as error:
                raise ConfigurationError(f"{path} cannot be opened as a boundary's log: {error}") from error
            self._open = opening.pop_all()
        self._gathered: list[Write] = []
        self._writes: queue.SimpleQueue[list[Write] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="onceward-boundary-writer", daemon=True)
        self._writer.start()
        self._closed = False

    # ── facts ───────────────────────────────────────────────────────────────────────────────────────────

    async def append(self, fact: NewFact) -> Appended:
        appended: Appended = await self._through_writer(Write(fact, None))
        return appended

    async def append_all(self, facts: Sequence[NewFact]) -> list[Appended | ConflictingDuplicate]:
        """Append all in one transaction."""
        self._refuse_if_closed()
        writes = [Write(fact, None) for fact in facts]
        self._hand_over()  # earlier writes first
        if writes:
            self._writes.put(writes)
        outcomes = await asyncio.gather(*(write.done for write in writes), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ConflictingDuplicate):
                raise outcome
        return cast(list[Appended | ConflictingDuplicate], outcomes)

    async def read(self, after: int, limit: int) -> list[Record]:
        records: list[Record] = []
        size = 0
        with readable():
            for each in self._reading.execute(READ, (after, limit)):
                size += len(each[1])
                if records and size > LARGEST_PAGE_BYTES:
                    break
                records.append(each)
        return records

    async def bounds(self) -> Bounds:
        with readable():
            return bounds_of(self._reading)

    async def size(self) -> int:
        with readable():
            pages, free, page = (
                self._reading.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * page)

    async def expire(self, older_than: Mapping[str, int]) -> int:
        return sum([await self._remove(EXPIRE, (stream, time)) for stream, time in older_than.items()])

    async def drop(self, through: int) -> int:
        return await self._remove(DROP, (through,))

    async def _remove(self, sql: str, which: tuple[str | int, ...]) -> int:
        """Remove in steps, between which appends get a turn."""

        def step(cursor: sqlite3.Cursor) -> int:
            removed = [row[0] for row in cursor.execute(sql, (*which, MOST_REMOVED))]
            if removed:
                cursor.execute(REMOVED, (max(removed),))
            return len(removed)

        total = 0
        while True:
            removed: int = await self._through_writer(Write(None, step))
            total += removed
            if removed < MOST_REMOVED:
                return total

    # ── cursors ─────────────────────────────────────────────────────────────────────────────────────────

    async def position(self, name: str, *, create: bool) -> int | None:
        with readable():
            row = self._reading.execute(POSITION, (name,)).fetchone()
        if row is not None:
            return int(row[0])
        if not create:
            return None
        await self._through_writer(Write(None, lambda cursor: cursor.execute(CREATE_CURSOR, (name,))))
        return 0

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        def advance(cursor: sqlite3.Cursor) -> int:
            cursor.execute(ADVANCE, (name, offset, at or _now()))
            return int(cursor.execute(POSITION, (name,)).fetchone()[0])

        position: int = await self._through_writer(Write(None, advance))
        return position

    async def cursors(self) -> list[Cursor]:
        with readable():
            return [Cursor(*row) for row in self._reading.execute(CURSORS)]

    async def close(self) -> None:
        """Let the writer finish, and unlock the directory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._hand_over()
        self._writes.put(None)
        await asyncio.to_thread(self._writer.join)
        self._open.close()

    # ── the writer ──────────────────────────────────────────────────────────────────────────────────────

    def _through_writer(self, write: Write) -> asyncio.Future[Any]:
        """Submit a write together with all others of this turn of the event loop: callers that the last commit woke
        submit their next writes in the same turn, and so share the next commit."""
        self._refuse_if_closed()
        self._gathered.append(write)
        if len(self._gathered) == 1:
            write.done.get_loop().call_soon(self._hand_over)
        return write.done

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("this boundary is closing")

    def _hand_over(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._writes.put(gathered)

    def _write(self) -> None:
        closing = False
        while not closing:
            writes: list[Write] = []
            more = self._writes.get()
            while more is not None:
                writes += more
                if len(writes) >= MOST_AT_ONCE or self._writes.empty():
                    break
                more = self._writes.get()
            closing = more is None
            if writes:
                self._commit(writes)
                _wake(writes)

    def _commit(self, writes: list[Write]) -> None:
        cursor = self._writing.cursor()
        last = self._last
        try:
            if all(write.fact is not None for write in writes) and self._append_new(cursor, writes):
                return
            cursor.execute("BEGIN IMMEDIATE")
            for write in writes:
                if write.fact is not None:
                    write.outcome = self._append_one(cursor, write.fact)
                elif write.operation is not None:
                    write.outcome = write.operation(cursor)
            cursor.execute("COMMIT")
        except Exception as error:  # noqa: BLE001  the writer must continue, and callers must get an answer
            # None of it was written, whatever the cause: a full disk, a read-only directory, an I/O error.
            self._last = last
            _roll_back(cursor)
            for write in writes:
                write.outcome = Unavailable(f"nothing was written: {error}; try again")

    def _append_new(self, cursor: sqlite3.Cursor, writes: list[Write]) -> bool:
        """Append all in one statement, which is its own transaction. Return False, and write nothing, if an id exists.

        One statement is one call into SQLite, so the GIL is released from its start to the end of the fsync.
        """
        now = _now()
        values: list[Any] = []
        for offset, write in enumerate(writes, self._last + 1):
            fact = write.fact
            assert fact is not None
            values += (
                offset,
                fact.message_id,
                fact.digest,
                fact.record,
                fact.stream,
                fact.appended_at or now,
            )
        try:
            cursor.execute(INSERT + MORE * (len(writes) - 1), values)
        except sqlite3.IntegrityError:
            return False
        for offset, write in enumerate(writes, self._last + 1):
            write.outcome = Appended(offset)
        self._last += len(writes)
        return True

    def _append_one(self, cursor: sqlite3.Cursor, fact: NewFact) -> Appended | BoundaryError:
        known = cursor.execute(FIND, (fact.message_id,)).fetchone()
        if known is not None:
            offset, digest = known
            if digest == fact.digest:
                return Appended(offset, duplicate=True)
            return ConflictingDuplicate(fact.message_id, offset)
        self._last += 1
        cursor.execute(
            INSERT,
            (self._last, fact.message_id, fact.digest, fact.record, fact.stream, fact.appended_at or _now()),
        )
        return Appended(self._last)


def bounds_of(connection: sqlite3.Connection) -> Bounds:
    first, last, removed = connection.execute(BOUNDS).fetchone()
    last = max(last or 0, removed)
    return Bounds(last + 1 if first is None else first, last)


@contextmanager
def readable() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise Unavailable(f"the log cannot be read: {error}; try again") from error


def _wake(writes: list[Write]) -> None:
    """Wake the callers, with one call to their event loop."""
    with suppress(RuntimeError):  # the loop is closed: no one is waiting
        writes[0].done.get_loop().call_soon_threadsafe(_resolve, writes)


def _resolve(writes: list[Write]) -> None:
    for write in writes:
        if write.done.done():
            continue
        if isinstance(write.outcome, BoundaryError):
            write.done.set_exception(write.outcome)
            write.done.exception()  # marks it as seen, in case the caller was canceled
        else:
            write.done.set_result(write.outcome)


def _prepare(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot create the data directory {directory}: {error}") from error
    return directory.absolute()


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Keep other servers out of the directory: two of them would assign the same offsets twice."""
    try:
        lock = (directory / "lock").open("a")
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be used as a data directory: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another process, such as a server, uses {directory}: stop it, or use another directory"
            ) from None
        yield


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        _migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("COMMIT")
    elif version > SCHEMA_VERSION:
        raise ConfigurationError(
            f"{path} was written by a newer onceward (schema {version}, this one supports {SCHEMA_VERSION}); upgrade "
            "this one"
        )


def _roll_back(cursor: sqlite3.Cursor) -> None:
    if cursor.connection.in_transaction:
        cursor.execute("ROLLBACK")


def _now() -> int:
    return time.time_ns() // 1_000_000
