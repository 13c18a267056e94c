"""The connections that a message can be sent on: of SQLAlchemy, psycopg and sqlite3, in a transaction of the caller."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from onceward._time import wall
from onceward.outbox.errors import OutboxError
from onceward.outbox.message import Message
from onceward.outbox.rows import ConnectionPort, insert_in_sqlite

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

AUTOCOMMIT = (
    "nothing was sent: no transaction is open on this connection, so the message would not commit with "
    "your writes; "
)
_ITS_SESSION = "; call it, and pass the session that it returns"
_ONE_OF_IT = "; pass a connection of it, in a transaction"
INSTEAD = {
    "scoped_session": _ITS_SESSION,
    "async_scoped_session": _ITS_SESSION,
    "sessionmaker": _ITS_SESSION,
    "async_sessionmaker": _ITS_SESSION,
    "Engine": _ONE_OF_IT,
    "AsyncEngine": _ONE_OF_IT,
    "ConnectionPool": _ONE_OF_IT,
    "AsyncConnectionPool": _ONE_OF_IT,
    "_ConnectionFairy": "; pass its driver_connection",
}
"""What to pass in place of something that is near, by the name of its class."""
IDLE = 0
"""The status of a psycopg connection without a transaction."""


class BlockingConnectionPort(ConnectionPort):
    """A connection of SQLAlchemy, in threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect.name
        driver: Any = connection.connection.driver_connection
        self._driver = driver
        check_transaction(driver)
        self.database = connection.engine.url.database or database_of(driver)

    async def insert_ready(self, message: Message) -> bool:
        connection = self._connection
        if connection.dialect.driver != "pysqlite":
            return await super().insert_ready(message)
        if not connection.in_transaction():
            connection.begin()
        try:
            return insert_in_sqlite(self._driver, message)
        except sqlite3.Error as error:
            raise DBAPIError.instance(
                "INSERT", None, error, sqlite3.Error, dialect=connection.dialect
            ) from error

    async def execute(self, sql: str, values: dict[str, Any]) -> list[Any]:
        connection = self._connection
        if connection.dialect.is_async or connection.dialect.driver not in DRIVERS:
            return list(connection.execute(_text(sql), _with_time(self.dialect, values)))
        # Otherwise bypass SQLAlchemy, which takes longer than the database. Its transaction begins all the same.
        if not connection.in_transaction():
            connection.begin()
        cursor = connection.connection.cursor()
        try:
            cursor.execute(DRIVERS[connection.dialect.driver](sql), _with_time(self.dialect, values))
            return list(cursor.fetchall())
        except connection.dialect.loaded_dbapi.Error as error:
            raise DBAPIError.instance(
                sql, None, error, connection.dialect.loaded_dbapi.Error, dialect=connection.dialect
            ) from error
        finally:
            cursor.close()


class AsyncConnectionPort(ConnectionPort):
    """A connection of SQLAlchemy, in asyncio."""

    def __init__(self, connection: AsyncConnection, driver: Any) -> None:
        self._connection = connection
        self.dialect = connection.dialect.name
        check_transaction(driver)
        self.database = connection.engine.url.database or database_of(driver)

    async def execute(self, sql: str, values: dict[str, Any]) -> list[Any]:
        return list(await self._connection.execute(_text(sql), _with_time(self.dialect, values)))


class BlockingPsycopgPort(ConnectionPort):
    """A connection of psycopg."""

    dialect = "postgresql"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        check_transaction(connection)
        self.database = database_of(connection)

    async def execute(self, sql: str, values: dict[str, Any]) -> list[Any]:
        from psycopg.rows import tuple_row

        with self._connection.cursor(row_factory=tuple_row) as cursor:
            return list(cursor.execute(_for_psycopg(sql), values).fetchall())


class AsyncPsycopgPort(BlockingPsycopgPort):
    """The same in asyncio."""

    async def execute(self, sql: str, values: dict[str, Any]) -> list[Any]:
        from psycopg.rows import tuple_row

        async with self._connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(_for_psycopg(sql), values)
            return list(await cursor.fetchall())


class SqlitePort(ConnectionPort):
    """A connection of sqlite3."""

    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        check_transaction(connection)
        self.database = database_of(connection)

    async def insert_ready(self, message: Message) -> bool:
        return insert_in_sqlite(self._connection, message)

    async def execute(self, sql: str, values: dict[str, Any]) -> list[Any]:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        try:
            return cursor.execute(sql, _with_time(self.dialect, values)).fetchall()
        finally:
            cursor.close()


@cache
def is_async(kind: Any) -> bool:
    """Whether sends on a connection of this class are awaited."""
    kinds = _kinds("sqlalchemy.ext.asyncio", "AsyncConnection", "AsyncSession")
    return issubclass(kind, (*kinds, *_kinds("psycopg", "AsyncConnection")))


async def port(connection: Any) -> ConnectionPort:
    """Return the port of a connection or session for threads. Raises `OutboxError` if it is none, or not in a
    transaction."""
    if isinstance(connection, Connection):
        return BlockingConnectionPort(connection)
    if isinstance(connection, Session):
        return BlockingConnectionPort(connection.connection())
    if is_django(connection):
        connection = django_driver(connection)
    if isinstance(connection, sqlite3.Connection):
        return SqlitePort(connection)
    if isinstance(connection, _kinds("psycopg", "Connection")):
        return BlockingPsycopgPort(connection)
    raise OutboxError(
        "nothing was sent: app.outbox takes a Connection, Session, AsyncConnection or AsyncSession of SQLAlchemy, a "
        "connection of psycopg or sqlite3, or one of Django, not "
        f"{type(connection).__module__}.{type(connection).__qualname__}{INSTEAD.get(type(connection).__name__, '')}"
    )


async def async_port(connection: Any) -> ConnectionPort:
    """`port` for asyncio."""
    if isinstance(connection, _kinds("psycopg", "AsyncConnection")):
        return AsyncPsycopgPort(connection)
    opened: AsyncConnection = connection
    if isinstance(connection, _kinds("sqlalchemy.ext.asyncio", "AsyncSession")):
        session: AsyncSession = connection
        opened = await session.connection()
    raw = await opened.get_raw_connection()
    return AsyncConnectionPort(opened, raw.driver_connection)


def is_django(connection: Any) -> bool:
    """Whether it is `django.db.connection`, or one of `django.db.connections`."""
    kinds = _kinds("django.utils.connection", "ConnectionProxy")
    return isinstance(connection, (*kinds, *_kinds("django.db.backends.base.base", "BaseDatabaseWrapper")))


def django_driver(connection: Any) -> Any:
    """The connection of the driver, in the transaction that Django has begun on it."""
    connection.ensure_connection()
    if not connection.in_atomic_block and connection.get_autocommit():
        raise OutboxError(
            f"{AUTOCOMMIT}send inside `with transaction.atomic():`, or set ATOMIC_REQUESTS for the database"
        )
    return connection.connection


def check_transaction(driver: Any) -> None:
    """Raise `OutboxError` if what is written on this connection commits by itself."""
    plain = getattr(driver, "_conn", driver)  # aiosqlite wraps the connection of sqlite3
    if isinstance(plain, sqlite3.Connection):
        mode = getattr(plain, "autocommit", -1)  # since Python 3.12; -1 is the old way
        commits_itself = mode is True or (mode is not False and plain.isolation_level is None)
        if commits_itself and not plain.in_transaction:
            raise OutboxError(f"{AUTOCOMMIT}run BEGIN first")
    elif getattr(driver, "autocommit", False) is True:
        status = getattr(getattr(driver, "info", None), "transaction_status", IDLE)
        if status == IDLE:
            raise OutboxError(
                f"{AUTOCOMMIT}it is in autocommit mode: send inside `with connection.transaction():`, or use a "
                "connection without autocommit"
            )


def database_of(driver: Any) -> str | None:
    """The name of its database, or the path of its file; None if the driver does not say."""
    plain = getattr(driver, "_conn", driver)
    if isinstance(plain, sqlite3.Connection):
        if plain is not driver:
            return None  # it belongs to another thread
        cursor = plain.cursor()
        cursor.row_factory = None
        try:
            return next(
                (file for _, name, file in cursor.execute("PRAGMA database_list") if name == "main"), ""
            )
        finally:
            cursor.close()
    name: str | None = getattr(getattr(driver, "info", None), "dbname", None)
    return name


def _kinds(module: str, *names: str) -> tuple[type[Any], ...]:
    """Classes of a package, if it is imported: a connection of one that is not cannot be given."""
    found = sys.modules.get(module)
    return () if found is None else tuple(getattr(found, name) for name in names)


def _with_time(dialect: str, values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "now": wall()} if dialect == "sqlite" else values


@lru_cache(50)
def _text(sql: str) -> TextClause:
    return text(sql)


@lru_cache(50)
def _for_psycopg(sql: str) -> str:
    return re.sub(r"(?<!:):(\w+)", r"%(\1)s", sql)


DRIVERS: dict[str, Callable[[str], str]] = {"pysqlite": str, "psycopg": _for_psycopg}
"""How the drivers that SQLAlchemy calls by these names spell a statement."""
