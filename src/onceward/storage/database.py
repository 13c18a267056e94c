"""How code that stores rows reaches them: in transactions, in threads and in asyncio, by SQL with `{now}` in it.

All logic is coroutines over `StoragePorts`. The blocking ports block and return, so the coroutine never suspends
(`onceward._sync`). `{now}` is the server's time where the database has a server, otherwise that of a given clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, Engine, TextClause, text
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from onceward._sync import run_blocking
from onceward.backoff import Backoff
from onceward.db.backends import BACKENDS
from onceward.db.operations import key_of
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.storage import migrations
from onceward.telemetry.context import current_attempt

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

SERIALIZATION_RETRIES = 20
SERIALIZATION_PAUSE = Backoff(0.005, cap=0.25, jitter=1.0)
"""Between retries after a serialization failure."""

_NOW = {"sqlite": ":now", "postgresql": "extract(epoch FROM clock_timestamp())::double precision"}
"""Seconds since 1970, as SQL."""


class StoragePorts(ABC):
    """Runs each operation in a transaction, and retries it after a collision with concurrent transactions."""

    asynchronous: bool
    dialect: Dialect

    async def transact(self, operation: Callable[..., T], *args: Any) -> T:
        """Run `operation(transaction, …)` in its own transaction."""
        for attempt in range(SERIALIZATION_RETRIES - 1):
            try:
                return await self._transact(operation, *args)
            except DBAPIError as error:
                if not BACKENDS[self.dialect.name].is_serialization_failure(error):
                    raise
            await self.sleep(SERIALIZATION_PAUSE.delay(attempt))
        return await self._transact(operation, *args)

    @abstractmethod
    async def _transact(self, operation: Callable[..., T], *args: Any) -> T: ...
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

    async def _transact(self, operation: Callable[..., T], *args: Any) -> T:
        with DbTransaction(self.engine, "DbSession") as transaction:
            return transaction.run(operation, *args)

    async def outside(self, operation: Callable[..., T], *args: Any) -> T:
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
        self._tasks: set[asyncio.Task[None]] = set()

    async def _transact(self, operation: Callable[..., T], *args: Any) -> T:
        from onceward.db.session_asyncio import AsyncDbSession

        async with AsyncDbSession(self.engine) as session:
            return await session.run(operation, *args)

    async def outside(self, operation: Callable[..., T], *args: Any) -> T:
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

    def __init__(self, dialect: str, clock: Callable[[], float]) -> None:
        self._now = _NOW[dialect]
        self._clock = clock
        self._needs_time = self._now == ":now"
        self.for_update = "" if dialect == "sqlite" else " FOR UPDATE"
        """Append to a query to lock its rows until the transaction ends. SQLite has only one writer anyway."""

    def on(self, connection: Connection, sql: str, **values: Any) -> Any:
        """Run a statement on a bare connection. SQLAlchemy ignores values that the statement does not name."""
        if self._needs_time:
            values["now"] = self._clock()
        return connection.execute(_statement(sql, self._now), values)

    def run(self, transaction: DbTransaction, sql: str, **values: Any) -> Any:
        if self._needs_time:
            values["now"] = self._clock()
        return transaction.connection.execute(_statement(sql, self._now), values)

    def many(self, transaction: DbTransaction, sql: str, values: list[dict[str, Any]]) -> None:
        """Run a statement once for each dict of values."""
        if values:
            time = {"now": self._clock()} if self._needs_time else {}
            transaction.connection.execute(_statement(sql, self._now), [each | time for each in values])

    def all(self, transaction: DbTransaction, sql: str, **values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in self.run(transaction, sql, **values).mappings()]

    def first(self, transaction: DbTransaction, sql: str, **values: Any) -> dict[str, Any] | None:
        row = self.run(transaction, sql, **values).mappings().first()
        return None if row is None else dict(row)

    def changed(self, transaction: DbTransaction, sql: str, **values: Any) -> int:
        return int(self.run(transaction, sql, **values).rowcount)

    def now(self, transaction: DbTransaction) -> float:
        return float(self.run(transaction, "SELECT {now}").scalar_one())

    def timestamp(self, transaction: DbTransaction) -> str:
        return datetime.fromtimestamp(self.now(transaction), UTC).isoformat()


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
    raise ConfigurationError(
        f"{missing}; call inbox.migrate(), or run `onceward inbox migrate --database URL`"
    )


def wait_for_lock(transaction: DbTransaction, name: str) -> None:
    """Lock the name, waiting if necessary, until the transaction ends."""
    transaction.backend.take_advisory_lock(transaction.connection, key_of(name))


@lru_cache(500)
def _statement(sql: str, now: str) -> TextClause:
    return text(sql.replace("{now}", now))
