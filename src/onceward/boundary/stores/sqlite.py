"""The embedded store: one SQLite file, one writer thread, one fsync for all concurrent writes.

Appends and confirms queue up for the writer, which puts all of them into one transaction. Readers have their own
connection: in WAL mode they never wait, and see only what is committed.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from onceward._files.identity import OpenFile, companions_of
from onceward._time import Moment
from onceward.boundary.errors import BoundaryError, ConflictingDuplicate, Unavailable
from onceward.boundary.holes import Hole, holes_of
from onceward.boundary.model import PAGE_BYTES, Appended, Gap
from onceward.boundary.store import (
    Bounds,
    Cursor,
    NewFact,
    Outcome,
    StoreDurability,
    full,
    too_many_names,
)
from onceward.boundary.stores.directory import connect, locked, prepare
from onceward.boundary.stores.files import FileObjects
from onceward.boundary.stores.writes import Write, wake
from onceward.boundary.wire import AROUND_RECORD, Record
from onceward.errors import ConfigurationError, FileLostError

MOST_AT_ONCE = 1000
"""Writes in one transaction: later ones must not wait forever."""
MOST_IN_STATEMENT = 5000
"""Facts: SQLite allows 32,766 values in a statement."""
MOST_REMOVED = 2000
"""Facts in one step of expiry: appends must not wait for all of it."""

INSERT = (
    'INSERT INTO facts ("offset", message_id, digest, record, stream, appended_at) VALUES (?, ?, ?, ?, ?, ?)'
)
MORE = ", (?, ?, ?, ?, ?, ?)"
FIND = 'SELECT "offset", digest FROM facts WHERE message_id = ?'
READ = """
    SELECT "offset", CAST(record AS BLOB), CAST(appended_at AS INTEGER) FROM facts
    WHERE "offset" > ? ORDER BY "offset" LIMIT ?
"""  # SQLite stores any value in any column: what another program wrote must not stop the facts behind it
TIMES_AFTER = """
    SELECT (SELECT CAST(appended_at AS INTEGER) FROM facts WHERE "offset" > value ORDER BY "offset" LIMIT 1)
    FROM json_each(?) ORDER BY key
"""
BOUNDS = """
    SELECT (SELECT min("offset") FROM facts), (SELECT max("offset") FROM facts), (SELECT through FROM removed)
"""  # as separate queries, for each of which SQLite reads one end of the index
EXPIRE = """
    DELETE FROM facts WHERE "offset" IN
        (SELECT "offset" FROM facts WHERE stream = ? AND appended_at < ? ORDER BY appended_at LIMIT ?)
    RETURNING "offset"
"""
DROP = """
    DELETE FROM facts WHERE "offset" IN
        (SELECT "offset" FROM facts WHERE "offset" <= ? ORDER BY "offset" LIMIT ?) RETURNING "offset"
"""
REMOVED = "UPDATE removed SET through = max(through, ?), steps = steps + 1"
NOTE_HOLE = 'INSERT OR REPLACE INTO holes ("first", "last", step) VALUES (?, ?, (SELECT steps FROM removed))'
HOLES = """
    SELECT "first", "last" FROM holes WHERE "last" BETWEEN ? AND ?
        AND step <= (SELECT after_step FROM cursors WHERE name = ?)
"""  # none reaches beyond the fact that ends a gap
FORGET_HOLES = f"""
    DELETE FROM holes WHERE "last" <= min(coalesce((SELECT min("offset") FROM facts), {2**63 - 1}),
        coalesce((SELECT min(position) FROM cursors), {2**63 - 1}))
"""  # those that every name has passed, and that no new one would meet
POSITION = "SELECT CAST(position AS INTEGER) FROM cursors WHERE name = ?"
CREATE_CURSOR = "INSERT INTO cursors (name, position, after_step) VALUES (?, ?, (SELECT steps FROM removed))"
COUNT_CURSORS = "SELECT count(*) FROM cursors"
REMOVE_CURSOR = "DELETE FROM cursors WHERE name = ? RETURNING position"
ADVANCE = """
    INSERT INTO cursors (name, position, confirmed_at) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET
        position = max(position, excluded.position),
        confirmed_at = CASE WHEN excluded.position > position THEN excluded.confirmed_at ELSE confirmed_at END
    RETURNING position
"""
CURSORS = "SELECT name, CAST(position AS INTEGER), CAST(confirmed_at AS INTEGER) FROM cursors ORDER BY name"
TRUSTED_TIME = "SELECT moment FROM trusted"
TRUST_TIME = (
    "INSERT INTO trusted (one, moment) VALUES (1, ?) ON CONFLICT DO UPDATE SET moment = excluded.moment"
)


class SqliteBoundaryStore:
    """A `BoundaryStore` in one directory, for one event loop. Refuses a directory that another process has open."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = prepare(Path(directory))
        path = self.directory / "boundary.db"
        with ExitStack() as opening:
            opening.enter_context(locked(self.directory))
            try:
                self._writing = opening.enter_context(closing(connect(path)))
                self._reading = opening.enter_context(closing(connect(path)))
                self._last = bounds_of(self._writing).last
                self.objects = FileObjects(self.directory / "objects")
                self._files = (OpenFile(path), *companions_of(path))
            except (sqlite3.Error, OSError) as error:
                raise ConfigurationError(f"{path} cannot be opened as a boundary's log: {error}") from error
            self._open = opening.pop_all()
        self._is_full = False
        self._gathered: list[Write] = []
        self._writes: queue.SimpleQueue[list[Write] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="onceward-boundary-writer", daemon=True)
        self._writer.start()
        self._closed = False

    # ── facts ───────────────────────────────────────────────────────────────────────────────────────────

    async def append(self, fact: NewFact) -> Appended:
        appended: Appended = await self._through_writer(Write(fact))
        return appended

    async def append_all(self, facts: Sequence[NewFact]) -> list[Outcome]:
        """Append all in one transaction, with what others write in this turn of the event loop."""
        self._refuse_if_closed()
        if not facts:
            return []
        writes = [Write(fact) for fact in facts]
        await asyncio.wait((self._submit(writes),))  # each has its own outcome
        if isinstance(writes[-1].outcome, Unavailable):  # of the transaction
            raise writes[-1].outcome
        return [write.outcome for write in writes]

    async def read(self, after: int, limit: int, largest: int = PAGE_BYTES) -> list[Record]:
        records: list[Record] = []
        size = 0
        with self._readable():
            for each in self._reading.execute(READ, (after, limit)):
                size += len(each[1]) + AROUND_RECORD
                if records and size > largest:
                    break
                records.append(each)
        return records

    async def times_after(self, offsets: Sequence[int]) -> list[int | None]:
        with self._readable():
            found = self._reading.execute(TIMES_AFTER, (msgspec.json.encode(offsets).decode(),))
            return [time for (time,) in found]

    async def bounds(self) -> Bounds:
        with self._readable():
            self.objects.check()  # this tells whether the store is ready
            return bounds_of(self._reading)

    async def size(self) -> int:
        with self._readable():
            return _bytes_of(self._reading)

    async def expire(self, older_than: Mapping[str, int], at_most: int | None = None) -> int:
        total = 0
        for stream, before in older_than.items():
            left = None if at_most is None else at_most - total
            total += await self._remove(EXPIRE, (stream, before), left)
        return total

    async def drop(self, through: int) -> int:
        return await self._remove(DROP, (through,))

    async def _remove(self, sql: str, which: tuple[str | int, ...], at_most: int | None = None) -> int:
        """Remove in steps, between which appends get a turn."""

        def step(cursor: sqlite3.Cursor) -> int:
            removed = [row[0] for row in cursor.execute(sql, (*which, size))]
            if removed:
                cursor.execute(REMOVED, (max(removed),))
                cursor.executemany(NOTE_HOLE, holes_of(removed))
                cursor.execute(FORGET_HOLES)
            return len(removed)

        total = 0
        while True:
            size = MOST_REMOVED if at_most is None else min(MOST_REMOVED, at_most - total)
            removed: int = await self._through_writer(Write(None, step)) if size else 0
            total += removed
            if removed < MOST_REMOVED:
                return total

    # ── cursors ─────────────────────────────────────────────────────────────────────────────────────────

    async def position(
        self, name: str, *, create: bool, start: int = 0, most: int | None = None
    ) -> int | None:
        with self._readable():
            row = self._reading.execute(POSITION, (name,)).fetchone()
        if row is not None:
            return int(row[0])
        if not create:
            return None

        def register(cursor: sqlite3.Cursor) -> int | BoundaryError:
            known = cursor.execute(POSITION, (name,)).fetchone()
            if known is not None:
                return int(known[0])
            if most is not None and cursor.execute(COUNT_CURSORS).fetchone()[0] >= most:
                return too_many_names(name, most)
            cursor.execute(CREATE_CURSOR, (name, start))
            return start

        position: int = await self._through_writer(Write(None, register))
        return position

    async def holes(self, name: str, gap: Gap) -> list[Hole]:
        with self._readable():
            return self._reading.execute(HOLES, (gap.first_missing, gap.last_missing, name)).fetchall()

    async def remove(self, name: str) -> int | None:
        def remove(cursor: sqlite3.Cursor) -> int | None:
            row = cursor.execute(REMOVE_CURSOR, (name,)).fetchone()
            return None if row is None else int(row[0])

        position: int | None = await self._through_writer(Write(None, remove))
        return position

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        def advance(cursor: sqlite3.Cursor) -> int:
            [[position]] = cursor.execute(ADVANCE, (name, offset, at or _now())).fetchall()
            return int(position)

        position: int = await self._through_writer(Write(None, advance, is_statement=True))
        return position

    async def cursors(self) -> list[Cursor]:
        with self._readable():
            return [Cursor(*row) for row in self._reading.execute(CURSORS)]

    async def durability(self) -> StoreDurability:
        return StoreDurability(
            "machine_crash", "the boundary's store is a directory, with an fsync before each answer"
        )

    # ── the clock ───────────────────────────────────────────────────────────────────────────────────────

    async def trusted_time(self) -> Moment | None:
        with self._readable():
            row = self._reading.execute(TRUSTED_TIME).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Moment)

    async def trust_time(self, moment: Moment) -> None:
        values = (msgspec.json.encode(moment).decode(),)
        await self._through_writer(Write(None, lambda cursor: cursor.execute(TRUST_TIME, values)))

    async def close(self) -> None:
        """Let the writer finish, and unlock the directory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._hand_over()
        self._writes.put(None)
        await asyncio.to_thread(self._writer.join)
        self._open.close()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        with readable():
            self._check_files()
            yield

    def _check_files(self) -> None:
        for each in self._files:
            each.check()

    # ── the writer ──────────────────────────────────────────────────────────────────────────────────────

    def _through_writer(self, write: Write) -> asyncio.Future[Any]:
        self._refuse_if_closed()
        return self._submit((write,))

    def _submit(self, writes: Sequence[Write]) -> asyncio.Future[Any]:
        """Submit writes together with all others of this turn of the event loop: callers that the last commit woke
        submit their next writes in the same turn, and so share the next commit. Return the future of the last one."""
        loop = asyncio.get_running_loop()
        if not self._gathered:
            loop.call_soon(self._hand_over)
        self._gathered += writes
        writes[-1].done = done = loop.create_future()
        return done

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
                wake(writes)

    def _commit(self, writes: list[Write]) -> None:
        cursor = self._writing.cursor()
        last = self._last
        self._is_full = False
        try:
            self._check_files()
            _roll_back(cursor)  # what could not be rolled back before: inside it, nothing would be committed
            if len(writes) == 1 and writes[0].is_statement and writes[0].operation is not None:
                writes[0].outcome = writes[0].operation(cursor)
            elif not self._certainly_fit(writes) or not self._append_new(cursor, writes):
                cursor.execute("BEGIN IMMEDIATE")
                for write in writes:
                    if write.fact is not None:
                        write.outcome = self._append_one(cursor, write.fact)
                    elif write.operation is not None:
                        write.outcome = write.operation(cursor)
                cursor.execute("COMMIT")
            self._check_files()  # they may have been deleted meanwhile: then this was written to nowhere
        except FileLostError as error:
            for write in writes:
                write.outcome = Unavailable(str(error))
        except Exception as error:  # noqa: BLE001  the writer must continue, and callers must get an answer
            # None of it was written, whatever the cause: a full disk, a read-only directory, an I/O error.
            self._last = last
            with suppress(sqlite3.Error):  # the next commit tries again
                _roll_back(cursor)
            for write in writes:
                write.outcome = Unavailable(f"nothing was written: {error}; try again")

    def _certainly_fit(self, writes: list[Write]) -> bool:
        """Return whether these are facts, and have room even if each takes as much as SQLite could need for it."""
        within: int | None = None
        for write in writes:
            if write.fact is None:
                return False
            if write.fact.within is not None:
                within = min(write.fact.within, within or write.fact.within)
        if within is None:
            return True
        return (
            _bytes_of(self._writing) + sum(2 * _row_bytes(write.fact) for write in writes if write.fact)
            <= within
        )

    def _append_new(self, cursor: sqlite3.Cursor, writes: list[Write]) -> bool:
        """Append all in one statement, which is its own transaction. Return False, and write nothing, if an id exists.

        One statement is one call into SQLite, so the GIL is released from its start to the end of the fsync.
        """
        if len(writes) > MOST_IN_STATEMENT:
            return False
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
        if fact.within is not None:
            size = _bytes_of(self._writing)  # with what this transaction has written so far
            # After one that does not fit, none does: of facts in order, the first ones are written.
            self._is_full = self._is_full or size + _row_bytes(fact) > fact.within
            if self._is_full:
                return full(size, fact.within)
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


def _bytes_of(connection: sqlite3.Connection) -> int:
    pages, free, page = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * page)


def _row_bytes(fact: NewFact) -> int:
    """About what a fact takes: its row, and its id in an index as well."""
    return len(fact.record) + 2 * len(fact.message_id) + 200


@contextmanager
def readable() -> Iterator[None]:
    try:
        yield
    except FileLostError as error:
        raise Unavailable(str(error)) from error
    except sqlite3.Error as error:
        raise Unavailable(f"the log cannot be read: {error}; try again") from error


def _roll_back(cursor: sqlite3.Cursor) -> None:
    if cursor.connection.in_transaction:
        cursor.execute("ROLLBACK")


def _now() -> int:
    return time.time_ns() // 1_000_000
