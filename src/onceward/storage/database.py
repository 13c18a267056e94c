"""How code that stores rows reaches them: in transactions, in threads and in asyncio, by SQL with `{now}` in it.

All logic is coroutines over `StoragePorts`. The blocking ports block and return, so the coroutine never suspends
(`onceward._sync`). `{now}` is the server's time where the database has a server, otherwise the wall clock or a given
one. `{steady}` is for leases and delays: the same, but on a database without a server it is a clock that nobody can set
(`onceward.storage.clocks`), unless one was given.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, Engine, TextClause, text
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from onceward._sync import run_blocking
from onceward._time import wall
from onceward.backoff import Backoff
from onceward.db.backends import BACKENDS
from onceward.db.engines import keep_private
from onceward.db.glance import Glance
from onceward.db.operations import key_of, run_first
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.storage import migrations
from onceward.storage.clocks import Clocks
from onceward.telemetry.context import current_attempt

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")
AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

SERIALIZATION_RETRIES = 20
SERIALIZATION_PAUSE = Backoff(0.005, cap=0.25, jitter=1.0)
"""Between retries after a serialization failure."""

_NOW = {"sqlite": ":now", "postgresql": "extract(epoch FROM clock_timestamp())::double precision"}
"""Seconds since 1970, as SQL."""
_STEADY = {**_NOW, "sqlite": ":steady"}


def read_committed(engine: AnyEngine) -> AnyEngine:
    """A transaction that waited for a lock must see what its holder did, whatever the engine's own isolation."""
    if getattr(engine.dialect, "name", "") != "postgresql":
        return engine
    return engine.execution_options(isolation_level="READ COMMITTED")


class StoragePorts(ABC):
    """Runs each operation in a transaction, and retries it after a collision with concurrent transactions."""

    asynchronous: bool
    dialect: Dialect

    async def transact(self, operation: Callable[..., T], *args: Any) -> T:
        """Run `operation(transaction, …)` in its own transaction."""
        return await self._patiently(operation, args, only_reads=False)

    async def look(self, operation: Callable[..., T], *args: Any) -> T:
        """`transact`, for an operation that only reads. It does not wait for who is writing: a handler that is stuck
        inside its transaction on SQLite does not keep operators from looking."""
        return await self._patiently(operation, args, only_reads=True)

    async def _patiently(self, operation: Callable[..., T], args: Sequence[Any], *, only_reads: bool) -> T:
        for attempt in range(SERIALIZATION_RETRIES - 1):
            try:
                return await self._transact(operation, args, only_reads=only_reads)
            except DBAPIError as error:
                if not BACKENDS[self.dialect.name].is_serialization_failure(error):
                    raise
            await self.sleep(SERIALIZATION_PAUSE.delay(attempt))
        return await self._transact(operation, args, only_reads=only_reads)

    def check_database(self) -> None:
        """Raise `FileLostError` if the database was in a file that was deleted or replaced."""
        BACKENDS[self.dialect.name].check_database(self._plain_engine)

    def glance(self, sql: str, values: dict[str, Any]) -> Glance | None:
        """What asks whether a query finds a row, without SQLAlchemy; None in asyncio."""
        return None if self.asynchronous else Glance(self._plain_engine, sql, values)

    @property
    @abstractmethod
    def _plain_engine(self) -> Engine: ...
    @abstractmethod
    async def _transact(self, operation: Callable[..., T], args: Sequence[Any], *, only_reads: bool) -> T: ...
    @abstractmethod
    async def outside(self, operation: Callable[..., T], *args: Any) -> T:
        """Run `operation(connection, …)`, which begins and ends its transactions itself."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None: ...
    @abstractmethod
    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it in the background, to its end."""


class BlockingStoragePorts(StoragePorts):
    asynchronous = False

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise ConfigurationError(
                f"Inbox needs an Engine from create_engine with a synchronous driver, not {engine!r}; "
                "for an AsyncEngine, use AsyncInbox"
            )
        self.engine = engine
        self.dialect = engine.dialect
        keep_private(engine)

    @property
    def _plain_engine(self) -> Engine:
        return self.engine

    async def _transact(self, operation: Callable[..., T], args: Sequence[Any], *, only_reads: bool) -> T:
        transaction = DbTransaction(self.engine, "DbSession")
        transaction.only_reads = only_reads
        with transaction:
            return transaction.run(operation, *args)

    async def outside(self, operation: Callable[..., T], *args: Any) -> T:
        self.check_database()
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return operation(connection, *args)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        threading.Thread(target=run_blocking, args=(coroutine,), name="onceward-inbox", daemon=True).start()


class AsyncStoragePorts(StoragePorts):
    asynchronous = True

    def __init__(self, engine: AsyncEngine) -> None:
        from sqlalchemy.ext.asyncio import AsyncEngine

        if not isinstance(engine, AsyncEngine):
            raise ConfigurationError(
                f"AsyncInbox needs an AsyncEngine from create_async_engine, not {engine!r}; "
                "for an Engine, use Inbox"
            )
        self.engine = engine
        self.dialect = engine.dialect
        keep_private(engine.sync_engine)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _plain_engine(self) -> Engine:
        return self.engine.sync_engine

    async def _transact(self, operation: Callable[..., T], args: Sequence[Any], *, only_reads: bool) -> T:
        from onceward.db.session_asyncio import AsyncDbSession

        session = AsyncDbSession(self.engine)
        session.port.transaction.repeated = True
        session.port.transaction.only_reads = only_reads
        async with session:
            return await session.run(operation, *args)

    async def outside(self, operation: Callable[..., T], *args: Any) -> T:
        self.check_database()
        async with self.engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")

            def run(plain: Connection) -> T:
                return operation(plain, *args)

            return await connection.run_sync(run)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        context = contextvars.copy_context()
        context.run(current_attempt.set, None)  # it outlives the attempt that happens to need it first
        task = asyncio.get_running_loop().create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Sql:
    """Runs statements inside the caller's transaction. One statement serves all databases."""

    def __init__(self, dialect: str, clock: Callable[[], float] | None = None) -> None:
        self._now = _NOW[dialect]
        self._clock = clock or wall
        self._needs_time = self._now == ":now"
        self._steady = (_STEADY if clock is None else _NOW)[dialect]
        self.clocks = Clocks(clock)
        self.for_update = "" if dialect == "sqlite" else " FOR UPDATE"
        """Append to a query to lock its rows until the transaction ends. SQLite has only one writer anyway."""

    def among(self, select: str) -> str:
        """The condition that a value is one of those that a query finds. PostgreSQL is to find them first: as a join,
        and with wrong statistics, it may read all rows of the table for each of them."""
        return f"= ANY(ARRAY({select}))" if self.for_update else f"IN ({select})"

    def on(self, connection: Connection, sql: str, **values: Any) -> Any:
        """Run a statement on a bare connection. SQLAlchemy ignores values that the statement does not name."""
        return connection.execute(self._statement(sql), values | self._times(connection, sql))

    def run(self, transaction: DbTransaction, sql: str, **values: Any) -> Any:
        return self.on(transaction.connection, sql, **values)

    def run_first(self, transaction: DbTransaction, sql: str, values: dict[str, Any]) -> tuple[int, Any]:
        """For statements of every event: see `onceward.db.operations.run_first`."""
        return run_first(transaction, self._statement(sql).text, values)

    def many(self, transaction: DbTransaction, sql: str, values: list[dict[str, Any]]) -> None:
        """Run a statement once for each dict of values."""
        if values:
            times = self._times(transaction.connection, sql)
            transaction.connection.execute(self._statement(sql), [each | times for each in values])

    def all(self, transaction: DbTransaction, sql: str, **values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in self.run(transaction, sql, **values).mappings()]

    def first(self, transaction: DbTransaction, sql: str, **values: Any) -> dict[str, Any] | None:
        row = self.run(transaction, sql, **values).mappings().first()
        return None if row is None else dict(row)

    def changed(self, transaction: DbTransaction, sql: str, **values: Any) -> int:
        return int(self.run(transaction, sql, **values).rowcount)

    def now(self, transaction: DbTransaction) -> float:
        return float(self.run(transaction, "SELECT {now}").scalar_one())

    def check_clock(self, transaction: DbTransaction, command: str, *, trust: bool) -> None:
        """Call it before anything is removed by its age; see `Clocks.check`."""
        self.clocks.check(transaction.connection, self.now(transaction), command, trust=trust)

    def steady(self, transaction: DbTransaction) -> float:
        return float(self.run(transaction, "SELECT {steady}").scalar_one())

    def timestamp(self, transaction: DbTransaction) -> str:
        return datetime.fromtimestamp(self.now(transaction), UTC).isoformat()

    def _statement(self, sql: str) -> TextClause:
        return _statement(sql, self._now, self._steady)

    def _times(self, connection: Connection, sql: str) -> dict[str, float]:
        if not self._needs_time:
            return {}
        times = {"now": self._clock()}
        if self._steady == ":steady" and "{steady}" in sql:
            times["steady"] = self.clocks.steady(connection)
        return times


class MissingTablesError(ConfigurationError):
    """The database has not all tables of this release."""


def check_tables(transaction: DbTransaction, store: migrations.Migratable) -> None:
    """Raise `ConfigurationError` unless all migrations have been applied."""
    if migrations.TABLE not in store.tables(transaction):
        missing = "the tables of the inbox do not exist"
    else:
        applied = transaction.connection.exec_driver_sql(f"SELECT version FROM {migrations.TABLE}").scalars()
        needed = map(attrgetter("version"), migrations.migrations(store.name))
        behind = sorted({*needed} - {*applied})
        if not behind:
            return
        missing = f"migration {', '.join(map(str, behind))} of the inbox is missing"
    raise MissingTablesError(
        f"{missing}; call inbox.migrate(), or run `onceward inbox migrate --database URL`"
    )


def wait_for_lock(transaction: DbTransaction, name: str) -> None:
    """Lock the name, waiting if necessary, until the transaction ends."""
    transaction.backend.take_advisory_lock(transaction.connection, key_of(name))


@lru_cache(500)
def _statement(sql: str, now: str, steady: str) -> TextClause:
    return text(sql.replace("{now}", now).replace("{steady}", steady))
