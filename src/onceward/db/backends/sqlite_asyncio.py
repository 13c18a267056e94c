"""A connection to SQLite in asyncio that hands as little as it can to its thread.

`aiosqlite` hands over each call: the cursor, the statement, its rows, the cursor's end. Here a statement and its rows
are one hand-over, and a statement that is known to be short needs none: it runs in the thread of the event loop, which
takes less time than waking another. That is done only where the database is ours already, so nothing waits for a lock,
and where our own code makes the transaction again if a statement had to be broken off: see `repeated`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter, thread_time
from typing import Any, Final, TypeVar

from aiosqlite import Connection

T = TypeVar("T")

SHORT: Final = 0.001
"""Seconds of work, on average, up to which a statement runs in the thread of the event loop."""
TURN: Final = 0.005
"""Seconds of such work after which the event loop gets its turn."""
TOO_LONG: Final = 0.05
"""Seconds after which such a statement is broken off."""
STEPS: Final = 20_000
"""Steps of SQLite's machine between two looks at the time: more than a short statement has."""
KNOWN: Final = 500
"""Statements whose pace is remembered."""


class BrokenOff(sqlite3.OperationalError):
    """A statement that had been short took too long, and its transaction was rolled back with it."""

    broken_off = True


class LoopConnection(Connection):
    def __init__(self, database: Any, **options: Any) -> None:
        options["check_same_thread"] = False
        super().__init__(partial(sqlite3.connect, database, **options), iter_chunk_size=64)
        self._thread.daemon = True
        self.repeated = False
        """Whether the open transaction is made again if a statement raises `BrokenOff`."""
        self._handed_over = 0
        self._paces: dict[str, float] = {}
        """Seconds per statement, on average, by its text; infinite for one that was broken off."""
        self._spent = 0.0
        """Seconds of work since the event loop had its turn."""
        self._until = inf
        self._broken_off = False

    async def _connect(self) -> LoopConnection:
        await super()._connect()
        self._conn.set_progress_handler(self._is_too_long, STEPS)
        return self

    def cursor(self) -> LoopCursor:  # type: ignore[override]
        return LoopCursor(self)

    async def _execute(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Have it called in the thread."""

        def call() -> T:
            try:
                return fn(*args, **kwargs)
            finally:
                self._handed_over -= 1

        if self._running and self._connection:
            self._handed_over += 1
        self._spent = 0.0
        return await super()._execute(call)  # type: ignore[no-any-return, no-untyped-call]

    async def run(self, sql: str, call: Callable[[], T]) -> T:
        """Run a statement here if it is short, and otherwise in the thread."""
        if self.takes(sql):
            if self._spent >= TURN:
                self._spent = 0.0
                await asyncio.sleep(0)
            try:
                return self.run_here(sql, call)
            except BrokenOff:
                if not self._conn.in_transaction:
                    raise
        return await self._execute(self._timed, sql, call)

    def takes(self, sql: str) -> bool:
        """Whether this statement is known to be short, and nothing keeps it from running here."""
        return (
            self.repeated
            and self._paces.get(sql, inf) <= SHORT
            and not self._handed_over
            and self.in_transaction
        )

    @property
    def in_transaction(self) -> bool:
        # Not by `_conn`, which is a property, too: this is asked for every statement.
        return self._connection is not None and self._connection.in_transaction

    def run_at_once(self, sql: str, before: Sequence[str], call: Callable[..., T], *args: Any) -> T | None:
        """Return `call(connection, …)`, which runs this statement here after those of `before`. None if it has to run
        in the thread, or the event loop needs its turn first."""
        # `takes`, without its calls.
        plain = self._connection
        if (
            not self.repeated
            or plain is None
            or self._spent >= TURN
            or self._handed_over
            or self._paces.get(sql, inf) > SHORT
            or not plain.in_transaction
        ):
            return None
        for words in before:
            plain.execute(words)
        return self.run_here(sql, call, plain, *args)

    def run_here(self, sql: str, call: Callable[..., T], *args: Any) -> T:
        began = perf_counter()
        self._until = began + TOO_LONG
        try:
            return call(*args)
        except sqlite3.OperationalError as error:
            if not self._broken_off:
                raise
            self._broken_off = False
            self._paces[sql] = (
                inf  # whatever its next times are: its transaction may have short and long ones
            )
            raise BrokenOff("it took too long for the event loop, and is repeated in a thread") from error
        finally:
            self._until = inf
            took = perf_counter() - began
            self._spent += took
            if took > TURN:
                self._paces[sql] = max(
                    took, self._paces[sql]
                )  # until its next times in the thread say otherwise

    def _timed(self, sql: str, call: Callable[[], T]) -> T:
        # The time of the thread: on a busy machine all else takes long, too.
        began = thread_time()
        result = call()
        took = thread_time() - began
        if sql not in self._paces and len(self._paces) >= KNOWN:
            self._paces.clear()
        pace = self._paces.get(sql, took)
        self._paces[sql] = pace if pace == inf else pace + (took - pace) / 4
        return result

    def _is_too_long(self) -> bool:
        """SQLite asks this from time to time, and interrupts the statement if so."""
        self._broken_off = perf_counter() > self._until
        return self._broken_off


class LoopCursor:
    """What SQLAlchemy uses of a cursor. A statement comes with all of its rows."""

    arraysize = 1

    def __init__(self, connection: LoopConnection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self._plain: sqlite3.Cursor

    async def __aenter__(self) -> LoopCursor:
        self._plain = self._connection._conn.cursor()
        return self

    async def execute(self, sql: str, parameters: Any = ()) -> LoopCursor:
        self._rows = await self._connection.run(sql, partial(self._execute, sql, parameters))
        return self

    def _execute(self, sql: str, parameters: Any) -> list[Any]:
        self._plain.execute(sql, parameters)
        return self._plain.fetchall() if self._plain.description else []

    async def executemany(self, sql: str, parameters: Any) -> LoopCursor:
        await self._connection._execute(self._plain.executemany, sql, parameters)
        return self

    async def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    async def fetchmany(self, size: int = arraysize) -> list[Any]:
        rows, self._rows = self._rows[:size], self._rows[size:]
        return rows

    async def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    async def close(self) -> None:
        self._rows = []
        if self._connection._handed_over:  # a statement that nobody waits for any more
            await self._connection._execute(self._plain.close)
        else:
            self._plain.close()

    @property
    def description(self) -> Any:
        return self._plain.description

    @property
    def rowcount(self) -> int:
        return self._plain.rowcount

    @property
    def lastrowid(self) -> int | None:
        return self._plain.lastrowid
