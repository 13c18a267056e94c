"""SQLite, by extended result code.

Python's sqlite3 begins a transaction only before a change: reads are outside it, and savepoints break. So a session
runs BEGIN IMMEDIATE on its own connection and leaves the engine unchanged. IMMEDIATE takes the database's only write
lock at once, so a session never discovers midway that it read data another one was changing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import Dialect, ExceptionContext
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.pool import Pool

from onceward._files.identity import OpenFile, companions_of
from onceward.db.backends.driver_errors import translate, translate_async
from onceward.db.errors import ENDED_WITHIN, SessionError

DUPLICATE: Final = frozenset(
    {
        sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY,
        sqlite3.SQLITE_CONSTRAINT_ROWID,
        sqlite3.SQLITE_CONSTRAINT_UNIQUE,
    }
)
LOCKED: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
UNAVAILABLE: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)
"""The disk is full, broken, mounted read-only or gone."""

_MARK: Final = "onceward_session"
"""Key in a connection's `info`: how many rows it had changed when its session began."""
_FILES: Final = "onceward_files"
"""Key in a connection's `info`: the files that it has open; none for a database in memory."""
_MARKED: Final = "PRAGMA defer_foreign_keys"
_listening: WeakSet[Dialect] = WeakSet()
_databases: WeakKeyDictionary[Pool, OpenFile] = WeakKeyDictionary()
"""The database file of each pool, as its first session found it. `engine.dispose()` makes a new pool, so an engine may
go on with another file after that."""


class Sqlite:
    cancels_late = False

    def begin(self, connection: Connection, *, only_reads: bool = False) -> None:
        driver: Any = connection.connection.driver_connection
        if driver.in_transaction and not _is_always_in_transaction(driver):
            raise SessionError(
                "this thread or engine has one connection for all sessions, and it is already in a transaction; "
                "end that one first, or use a database file"
            )
        if connection.dialect not in _listening:
            _keep_when_interrupted(connection.dialect)
        for each in connection.info.get(_FILES, ())[1:]:  # the first was checked before connecting
            each.check()
        connection.begin()
        if driver.in_transaction:  # begun by autocommit=False or a listener, most likely as DEFERRED
            connection.exec_driver_sql("ROLLBACK")
        words = "BEGIN" if only_reads else "BEGIN IMMEDIATE"
        try:
            _do(connection, words)
        except sqlite3.DatabaseError as error:  # locked, or not a database
            kind = OperationalError if isinstance(error, sqlite3.OperationalError) else DatabaseError
            raise kind(words, None, error) from error
        connection.info[_MARK] = driver.total_changes
        if _FILES not in connection.info:
            connection.info[_FILES] = _find_files(connection)

    def note_repeated(self, connection: Connection, *, repeated: bool) -> None:
        driver: Any = connection.connection.driver_connection
        if hasattr(driver, "repeated"):
            driver.repeated = repeated

    def check_files(self, connection: Connection) -> None:
        for each in connection.info.get(_FILES, ()):
            each.check()

    def check_database(self, engine: Engine) -> None:
        known = _databases.get(engine.pool)
        if known is not None:
            known.check()

    def has_ended(self, connection: Connection) -> bool:
        # For example after a full disk, an I/O error or RAISE(ROLLBACK).
        driver: Any = connection.connection.driver_connection
        return not driver.in_transaction

    is_idle = has_ended

    def lend(self, connection: Connection) -> Any:
        # This setting ends with its transaction, and does nothing while foreign keys are not enforced. If they are, it
        # would change when a violation raises.
        marked = _ask(connection, _MARKED)
        if not marked and not _ask(connection, "PRAGMA foreign_keys"):
            _do(connection, f"{_MARKED} = ON")
            marked = True
        return marked

    def check_lent(self, connection: Connection, mark: Any) -> None:
        self._check_open(connection)
        if mark and not _ask(connection, _MARKED):
            raise SessionError(ENDED_WITHIN)

    def will_not_commit(self, connection: Connection) -> bool:
        return False  # an error undoes only its own statement

    def is_duplicate(self, error: DBAPIError) -> bool:
        return _code(error) in DUPLICATE

    def is_serialization_failure(self, error: BaseException) -> bool:
        # A session has the only write lock from the start.
        return getattr(getattr(error, "orig", error), "broken_off", False)

    def is_unavailable(self, error: DBAPIError) -> bool:
        return _code(error) & 0xFF in UNAVAILABLE

    def has_written(self, connection: Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        return bool(driver.total_changes != connection.info.get(_MARK, driver.total_changes))

    def is_lock_timeout(self, error: DBAPIError) -> bool:
        return _code(error) & 0xFF in LOCKED  # the low byte is the code, the rest its details

    @contextmanager
    def lock_timeout(self, connection: Connection, seconds: float) -> Iterator[None]:
        yield  # the session locked the whole database when it began

    def cancel(self, driver: Any) -> None:
        driver.interrupt()

    def part_words(self, number: int) -> Sequence[str]:
        return _FIRST_PART if number == 1 else _NEXT_PART[number % 2]

    def begin_part(self, connection: Connection, number: int) -> None:
        # Outside a transaction it would begin one, and its end would commit.
        self._check_open(connection)
        for words in self.part_words(number):
            _do(connection, words)

    def end_part(self, runner: Any) -> None:
        if not runner.in_transaction:
            raise SessionError(ENDED_WITHIN)

    def undo_part(self, connection: Connection, number: int) -> None:
        self._check_open(connection)
        _do(connection, f"ROLLBACK TO {_part(number)}")

    def check_parts(self, connection: Connection, last: int) -> None:
        # Gone if user code has ended the transaction and begun another.
        self._check_open(connection)
        _do(connection, f"RELEASE {_part(last)}")

    def runner(self, connection: Connection) -> Any:
        return connection.connection.driver_connection

    def direct(
        self, connection: Connection, runner: Any, sql: str, values: Any, before: Sequence[str] = ()
    ) -> tuple[int, Any] | None:
        try:
            if not isinstance(runner, sqlite3.Connection):
                return _run_in_loop(runner, sql, values, before)
            if before:
                _check_in_transaction(runner)
                for words in before:
                    runner.execute(words)
            return _run(runner, sql, values)
        except sqlite3.Error as error:
            translate(connection, error, sql, values)

    async def direct_async(
        self, connection: Connection, runner: Any, sql: str, values: Any, before: Sequence[str] = ()
    ) -> tuple[int, Any] | None:
        try:
            return _run_in_loop(runner, sql, values, before)
        except sqlite3.Error as error:
            await translate_async(connection, error, sql, values)

    def _check_open(self, connection: Connection) -> None:
        if self.has_ended(connection):
            raise SessionError(ENDED_WITHIN)

    def take_advisory_lock(self, connection: Connection, key: int) -> None:
        """Do nothing: no other session can write to this database until this one ends."""


def _check_in_transaction(driver: Any) -> None:
    """Raise if it is in none: a savepoint would begin one, and its end would commit."""
    if not driver.in_transaction:
        raise SessionError(ENDED_WITHIN)


def _run_in_loop(driver: Any, sql: str, values: Any, before: Sequence[str]) -> tuple[int, Any] | None:
    """Run it in the thread of the event loop, if it may run there."""
    if before:
        _check_in_transaction(driver)
    try:
        at_once = driver.run_at_once
    except AttributeError:  # a connection of aiosqlite, on an engine that is not ours
        return None
    try:
        result: tuple[int, Any] | None = at_once(sql, before, _run, sql, values)
        return result
    except sqlite3.Error as error:
        if getattr(error, "broken_off", False) and not before and driver.in_transaction:
            return None  # it has changed nothing, and goes to the thread
        raise


def _part(number: int) -> str:
    """Two names in turn: few texts to compile, and none undoes the part before."""
    return f"onceward_part_{number % 2}"


_FIRST_PART: Final = (f"SAVEPOINT {_part(1)}",)
# The savepoint before has no use any more, and the more are open, the more a write costs.
_NEXT_PART: Final = tuple((f"RELEASE {_part(number + 1)}", f"SAVEPOINT {_part(number)}") for number in (0, 1))


def _run(plain: sqlite3.Connection, sql: str, values: Any) -> tuple[int, Any]:
    cursor = plain.execute(sql, values)
    if cursor.description is None:
        return cursor.rowcount, None
    row = cursor.fetchone()
    result = cursor.rowcount, row
    if row is not None:
        cursor.close()  # one that has no rows has ended
    return result


def _do(connection: Connection, words: str) -> None:
    """Bypass SQLAlchemy, which would spend more time on a few words than SQLite does."""
    # A cursor that failed stays alive in its traceback. If it were open, the garbage collector would reset it later, in
    # any thread. That one then waits for who uses this connection: forever, if that waits for a lock of this thread.
    with closing(connection.connection.cursor()) as cursor:
        cursor.execute(words)


def _ask(connection: Connection, words: str) -> bool:
    with closing(connection.connection.cursor()) as cursor:
        cursor.execute(words)
        return cursor.fetchone() == (1,)


def _find_files(connection: Connection) -> tuple[OpenFile, ...]:
    """The database's file and those beside it. Called inside the first transaction of the connection."""
    with closing(connection.connection.cursor()) as cursor:
        cursor.execute("PRAGMA database_list")
        path = next((file for _, name, file in cursor.fetchall() if name == "main"), "")
    if not path:
        return ()
    pool = connection.engine.pool
    if pool not in _databases:
        _databases[pool] = OpenFile(_as_named(connection.engine, path), hold=True)
    return (_databases[pool], *companions_of(path))


def _as_named(engine: Engine, path: str) -> str:
    """The path in the engine's URL, if that leads there: a symlink in it may come to lead elsewhere."""
    named = os.path.abspath(engine.url.database or path)
    return named if os.path.realpath(named) == os.path.realpath(path) else path


def _keep_when_interrupted(dialect: Dialect) -> None:
    """Make an interrupted statement leave the connection open, so it can be rolled back.

    Otherwise SQLAlchemy closes it. A closed SQLite connection keeps its lock while a cursor is alive, and the
    traceback of the interrupt keeps the cursor alive. The listener affects only connections of sessions.
    """
    _listening.add(dialect)
    event.listen(dialect, "handle_error", _keep_open)


def _keep_open(context: ExceptionContext) -> None:
    interrupted = not isinstance(context.original_exception, Exception)
    if interrupted and context.connection is not None and _MARK in context.connection.info:
        context.is_disconnect = False
        if context.dialect.is_async:
            # The driver's thread still runs the statement, and the rollback would wait for its end.
            _plain(context.connection.connection.driver_connection).interrupt()


def _code(error: DBAPIError) -> int:
    return int(getattr(error.orig, "sqlite_errorcode", 0))


def _is_always_in_transaction(driver: Any) -> bool:
    # autocommit=False exists since Python 3.12.
    return getattr(_plain(driver), "autocommit", None) is False


def _plain(driver: Any) -> Any:
    return getattr(driver, "_conn", driver)  # aiosqlite wraps the sqlite3 connection
