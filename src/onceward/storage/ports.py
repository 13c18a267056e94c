"""How code that stores rows reaches its database, in threads and in asyncio.

All logic is coroutines over these ports. The blocking ports block and return, so the coroutine never suspends
(`onceward._sync`).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from onceward._sync import run_blocking
from onceward.backoff import Backoff
from onceward.db import DbSession
from onceward.db.backends import backend_of
from onceward.errors import ConfigurationError
from onceward.telemetry.context import current_attempt

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

SERIALIZATION_RETRIES = 20
SERIALIZATION_PAUSE = Backoff(0.005, cap=0.25, jitter=1.0)
"""Between retries after a serialization failure."""


class StoragePorts(ABC):
    """Runs each operation in a transaction, and retries it after a collision with concurrent transactions."""

    asynchronous: bool
    dialect: Dialect

    async def transact(self, operation: Callable[..., T], *args: Any) -> T:
        """Run `operation(transaction, …)` in its own transaction."""
        backend = backend_of(self.dialect)
        for attempt in range(SERIALIZATION_RETRIES - 1):
            try:
                return await self._transact(operation, *args)
            except DBAPIError as error:
                if not backend.is_serialization_failure(error):
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
        with DbSession(self.engine) as session:
            return session._run(operation, *args)

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
            return await session._run(operation, *args)

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
