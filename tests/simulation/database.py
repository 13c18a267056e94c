"""SQLite behind a wire: what SQLAlchemy takes for a connection of `aiosqlite`, without its thread.

Every statement is a crossing. One that is lost is an I/O error: what was not committed is rolled back. A commit whose
reply is lost has happened. A process that dies leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import AsyncAdaptedQueuePool, Engine, NullPool, QueuePool, create_engine, make_url
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.simulation.loop import Process, here
from tests.simulation.threads import block
from tests.simulation.wire import Wire, WireLost

PATIENCE = 5.0
"""Seconds to wait for another writer."""


class Cursor:
    arraysize = 1

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._raw = connection._conn.cursor()

    async def __aenter__(self) -> Cursor:
        return self

    async def execute(self, sql: str, values: Any = ()) -> Cursor:
        await self._connection.do(sql, lambda: self._raw.execute(sql, values))
        return self

    async def executemany(self, sql: str, values: Any) -> Cursor:
        await self._connection.do(sql, lambda: self._raw.executemany(sql, values))
        return self

    async def fetchall(self) -> list[Any]:
        return self._raw.fetchall()

    async def close(self) -> None:
        self._raw.close()

    @property
    def description(self) -> Any:
        return self._raw.description

    @property
    def rowcount(self) -> int:
        return self._raw.rowcount

    @property
    def lastrowid(self) -> int | None:
        return self._raw.lastrowid


class Connection:
    """As `aiosqlite.Connection`, as far as SQLAlchemy uses it."""

    def __init__(self, database: SimulatedDatabase, process: Process) -> None:
        self._database = database
        self._process = process
        self._conn = sqlite3.connect(database.path, timeout=0, check_same_thread=False)
        self._connection: sqlite3.Connection | None = self._conn
        self._conn.execute("PRAGMA synchronous = OFF")
        process.last_wishes.append(self.stop)

    async def do(self, sql: str, action: Callable[[], Any]) -> Any:
        wire, process = self._database.wire, self._process
        if not process.alive:
            raise sqlite3.OperationalError("this process is dead")
        what = " ".join(sql.split()[:3])
        try:
            await wire.send(process, "database", what)
            until = wire.loop.time() + PATIENCE
            while True:
                try:
                    result = action()
                    break
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or wire.loop.time() >= until:
                        raise
                await asyncio.sleep(0.05)
            if sql == "COMMIT":
                self._database.committed(process)
            await wire.receive(process, "database", what)
        except WireLost as lost:
            self._conn.rollback()
            gone = sqlite3.OperationalError(f"disk I/O error: {lost}")
            gone.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise gone from None
        return result

    def cursor(self) -> Cursor:
        if self._connection is None:
            raise ValueError("no active connection")
        return Cursor(self)

    async def commit(self) -> None:
        await self.do("COMMIT", self._conn.commit)

    async def rollback(self) -> None:
        self._conn.rollback()

    async def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        # A closed connection keeps its lock while a cursor is alive, unless it is rolled back first.
        if self._connection is not None:
            self._connection = None
            self._conn.rollback()
            self._conn.close()

    def interrupt(self) -> None:
        """Nothing runs for long."""

    @property
    def in_transaction(self) -> bool:
        return self._connection is not None and self._conn.in_transaction

    @property
    def total_changes(self) -> int:
        return self._conn.total_changes if self._connection is not None else 0

    @property
    def isolation_level(self) -> str | None:
        return self._conn.isolation_level

    @isolation_level.setter
    def isolation_level(self, value: Any) -> None:
        self._conn.isolation_level = value


class BlockingCursor:
    """As `sqlite3.Cursor`, in a simulated thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._raw = connection._conn.cursor()

    def execute(self, sql: str, values: Any = ()) -> BlockingCursor:
        block(self._connection.do(sql, lambda: self._raw.execute(sql, values)))
        return self

    def executemany(self, sql: str, values: Any) -> BlockingCursor:
        block(self._connection.do(sql, lambda: self._raw.executemany(sql, values)))
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class BlockingConnection:
    """As `sqlite3.Connection`, in a simulated thread."""

    def __init__(self, connection: Connection) -> None:
        self.__dict__["_connection"] = connection

    def cursor(self) -> BlockingCursor:
        return BlockingCursor(self._connection)

    def execute(self, sql: str, values: Any = ()) -> BlockingCursor:
        return self.cursor().execute(sql, values)

    def commit(self) -> None:
        block(self._connection.commit())

    def close(self) -> None:
        self._connection.stop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection._conn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._connection._conn, name, value)


class SimulatedDatabase:
    """A file, the engines to it, and a listener to all commits."""

    def __init__(self, path: Path, wire: Wire, committed: Callable[[Process], None]) -> None:
        self.path = path
        self.wire = wire
        self.committed = committed
        self._dialect = _dialect()

    def engine(self) -> AsyncEngine:
        """An engine for the process that calls this. Making a dialect takes longer than most of what it is used for."""
        process, dialect = here(), self._dialect
        pool = AsyncAdaptedQueuePool(
            lambda: AsyncAdapt_aiosqlite_connection(dialect.dbapi, Connection(self, process)), dialect=dialect
        )
        engine = Engine(pool, dialect, make_url(f"sqlite+aiosqlite:///{self.path}"))
        return AsyncEngine(engine.execution_options(compiled_cache=_compiled))

    def blocking_engine(self) -> Engine:
        """The same for simulated threads."""
        process, dialect = here(), _blocking_dialect()
        pool = QueuePool(
            lambda: BlockingConnection(Connection(self, process)),  # type: ignore[arg-type, return-value]
            pool_size=50,
            dialect=dialect,
        )
        engine = Engine(pool, dialect, make_url(f"sqlite:///{self.path}"))
        return engine.execution_options(compiled_cache=_blocking_compiled)


_compiled: dict[Any, Any] = {}
"""Statements are compiled once for all engines: they have one dialect, and there are few."""

_blocking_compiled: dict[Any, Any] = {}


@cache
def _blocking_dialect() -> Any:
    engine = create_engine("sqlite://", poolclass=NullPool)
    engine.connect().close()
    return engine.dialect


@cache
def _dialect() -> Any:
    engine = create_async_engine("sqlite+aiosqlite://", poolclass=NullPool)

    async def initialize() -> None:
        async with engine.connect():
            pass

    asyncio.run(initialize())
    return engine.sync_engine.dialect
