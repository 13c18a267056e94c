"""PostgreSQL, by SQLSTATE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, Final

from sqlalchemy import BigInteger, Connection, Engine, func, literal, select, text
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.util import await_only

from onceward.db.backends.driver_errors import translate, translate_async
from onceward.db.calls import CALLS
from onceward.db.errors import ENDED_WITHIN, FAILED_WITHIN, SessionError
from onceward.errors import ConfigurationError

UNIQUE_VIOLATION: Final = "23505"
LOCK_NOT_AVAILABLE: Final = "55P03"
SERIALIZATION_FAILURES: Final = ("40001", "40P01")
"""A conflict under REPEATABLE READ or SERIALIZABLE, and a deadlock."""
UNAVAILABLE: Final = ("08", "57P", "53")
"""Connection exceptions; shutdown and startup; too many connections and other lack of resources."""
READ_ONLY: Final = "25006"
"""After a failover, for example, when the connected server has become a standby."""

CANCEL_TIMEOUT: Final = 5.0
"""Seconds to ask the server to cancel a statement."""

KNOWN: Final = 100
"""Texts whose cursors a connection keeps."""
_CURSORS: Final = "onceward_cursors"
"""Key in a connection's `info`."""
_WORDS: Final = ""
"""Stands for the text of savepoints, which differ."""

_READ_LOCK_TIMEOUT = text("SELECT current_setting('lock_timeout')")
_XACT_ID = text("SELECT pg_current_xact_id_if_assigned()::text")
_BEGAN: Final = "SELECT extract(epoch FROM transaction_timestamp())"
"""The same in a whole transaction, whatever it does with savepoints, and another in the next one."""
_IDLE: Final = 0
_FAILED: Final = 3
"""Of libpq's `PGTransactionStatusType`."""
_SET_LOCK_TIMEOUT = text("SELECT set_config('lock_timeout', :value, true)")  # true: as SET LOCAL


class PostgreSql:
    cancels_late = True

    def begin(self, connection: Connection, *, only_reads: bool = False) -> None:
        if getattr(connection.connection.dbapi_connection, "autocommit", False):
            raise ConfigurationError(
                "the engine is set to AUTOCOMMIT, where every statement is its own transaction; "
                "pass engine.execution_options(isolation_level='READ COMMITTED') to the session"
            )
        connection.begin()

    def note_repeated(self, connection: Connection, *, repeated: bool) -> None:
        """Do nothing."""

    def check_files(self, connection: Connection) -> None:
        """Do nothing: its files are the server's."""

    def check_database(self, engine: Engine) -> None:
        """Do nothing: its files are the server's."""

    def has_ended(self, connection: Connection) -> bool:
        return False  # a failed transaction stays open and refuses everything until it is rolled back

    def is_idle(self, connection: Connection) -> bool:
        return _status(connection) == _IDLE

    def lend(self, connection: Connection) -> Any:
        if _status(connection) == _FAILED:
            return None
        return connection.exec_driver_sql(_BEGAN).scalar()

    def check_lent(self, connection: Connection, mark: Any) -> None:
        if _status(connection) == _FAILED:
            raise SessionError(FAILED_WITHIN)
        if self.is_idle(connection) or connection.exec_driver_sql(_BEGAN).scalar() != mark:
            raise SessionError(ENDED_WITHIN)

    def will_not_commit(self, connection: Connection) -> bool:
        # COMMIT of a failed transaction rolls back without an error, so run a statement that does fail.
        try:
            connection.execute(text("SELECT 1")).close()
        except SQLAlchemyError:
            return True
        return False

    def is_duplicate(self, error: DBAPIError) -> bool:
        return _sqlstate(error) == UNIQUE_VIOLATION

    def is_serialization_failure(self, error: BaseException) -> bool:
        return _sqlstate(error) in SERIALIZATION_FAILURES

    def is_unavailable(self, error: DBAPIError) -> bool:
        # Without an SQLSTATE the server did not answer: no connection, or a broken one.
        state = _sqlstate(error)
        return (
            error.connection_invalidated
            or state == READ_ONLY
            or (isinstance(error, OperationalError) and (state is None or state.startswith(UNAVAILABLE)))
        )

    def has_written(self, connection: Connection) -> bool:
        return connection.execute(_XACT_ID).scalar() is not None

    def is_lock_timeout(self, error: DBAPIError) -> bool:
        return _sqlstate(error) == LOCK_NOT_AVAILABLE

    @contextmanager
    def lock_timeout(self, connection: Connection, seconds: float) -> Iterator[None]:
        milliseconds = max(1, ceil(seconds * 1000))  # 0 would mean forever
        with connection.begin_nested():  # rolling back to the savepoint also restores the old setting
            before = connection.execute(_READ_LOCK_TIMEOUT).scalar_one()
            connection.execute(_SET_LOCK_TIMEOUT, {"value": str(milliseconds)}).close()
            yield
            connection.execute(_SET_LOCK_TIMEOUT, {"value": before}).close()

    def cancel(self, driver: Any) -> None:
        if hasattr(driver, "cancel_safe"):
            driver.cancel_safe(timeout=CANCEL_TIMEOUT)
        elif hasattr(driver, "cancel"):  # psycopg2
            driver.cancel()

    def part_words(self, number: int) -> Sequence[str]:
        return (f"SAVEPOINT onceward_part_{number}",)  # inside the one before, which saves a round trip

    def begin_part(self, connection: Connection, number: int) -> None:
        for words in self.part_words(number):
            connection.exec_driver_sql(words).close()

    def end_part(self, runner: Any) -> None:
        """Do nothing: `check_parts` will see."""

    def undo_part(self, connection: Connection, number: int) -> None:
        connection.exec_driver_sql(f"ROLLBACK TO SAVEPOINT onceward_part_{number}").close()

    def check_parts(self, connection: Connection, last: int) -> None:
        # Gone if user code has ended the transaction and begun another.
        connection.exec_driver_sql("RELEASE SAVEPOINT onceward_part_1").close()

    def runner(self, connection: Connection) -> KeptCursors | None:
        return _cursors(connection)

    def direct(
        self,
        connection: Connection,
        runner: KeptCursors | None,
        sql: str,
        values: Any,
        before: Sequence[str] = (),
    ) -> tuple[int, Any] | None:
        if connection.dialect.is_async:
            return await_only(self.direct_async(connection, runner, sql, values, before))
        if runner is None:
            return None
        with CALLS.call(connection):
            try:
                return runner.send(sql, values, before)
            except connection.dialect.loaded_dbapi.Error as error:
                translate(connection, error, sql, values)

    async def direct_async(
        self,
        connection: Connection,
        runner: KeptCursors | None,
        sql: str,
        values: Any,
        before: Sequence[str] = (),
    ) -> tuple[int, Any] | None:
        if runner is None:
            return None
        with CALLS.call(connection):
            try:
                return await runner.send_async(sql, values, before)
            except connection.dialect.loaded_dbapi.Error as error:
                await translate_async(connection, error, sql, values)

    def take_advisory_lock(self, connection: Connection, key: int) -> None:
        # The xact form is released when the transaction ends, so it cannot leak with a pooled connection.
        connection.execute(select(func.pg_advisory_xact_lock(literal(key, BigInteger)))).close()


class KeptCursors:
    """The cursors of one connection, one for each text that goes to the driver. Making a cursor, and finding out how it
    passes values of these types, is a third of what a statement costs the client."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._cursors: dict[str, Any] = {}

    def of(self, sql: str) -> Any:
        cursor = self._cursors.get(sql)
        if cursor is None:
            if len(self._cursors) >= KNOWN:
                self._cursors.clear()
            cursor = self._cursors[sql] = self._driver.cursor()
        return cursor

    def give_up(self, sql: str) -> None:
        """Do not keep the rows that it has read."""
        self._cursors.pop(sql, None)

    def send(self, sql: str, values: Any, before: Sequence[str]) -> tuple[int, Any]:
        for words in before:
            self.of(_WORDS).execute(words, prepare=False)  # there are many of them, and each is short
        cursor = self.of(sql)
        cursor.execute(sql, values)
        if not cursor.pgresult.nfields:
            return cursor.rowcount, None
        if cursor.rowcount > 1:
            self.give_up(sql)
        return cursor.rowcount, cursor.fetchone()

    async def send_async(self, sql: str, values: Any, before: Sequence[str]) -> tuple[int, Any]:
        for words in before:
            await self.of(_WORDS).execute(words, prepare=False)
        cursor = self.of(sql)
        await cursor.execute(sql, values)
        if not cursor.pgresult.nfields:
            return cursor.rowcount, None
        if cursor.rowcount > 1:
            self.give_up(sql)
        return cursor.rowcount, await cursor.fetchone()


def _cursors(connection: Connection) -> KeptCursors | None:
    """None if the driver is not psycopg 3."""
    info = connection.info
    found: KeptCursors | None = info.get(_CURSORS)
    if found is None:
        driver: Any = connection.connection.driver_connection
        if not hasattr(driver, "pipeline"):
            return None
        found = info[_CURSORS] = KeptCursors(driver)
    return found


def _status(connection: Connection) -> int | None:
    """The state of the transaction as the driver knows it, without a call to the server. None if it does not say."""
    driver: Any = connection.connection.driver_connection
    if hasattr(driver, "pgconn"):
        return int(driver.pgconn.transaction_status)
    return driver.get_transaction_status() if hasattr(driver, "get_transaction_status") else None  # psycopg2


def _sqlstate(error: BaseException) -> str | None:
    driver = getattr(error, "orig", error)  # a handler with a driver's connection gets its own errors
    return getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None)
