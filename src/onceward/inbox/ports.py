"""What an inbox needs from outside, for threads and for asyncio: sessions, waiting, calling user code.

Everything that decides is a coroutine over these ports. Those of threads block and return, so that the coroutine never
suspends (`onceward._sync`).
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from onceward._sync import run_blocking
from onceward.db import DbSession
from onceward.db.backends import backend_of
from onceward.errors import ConfigurationError
from onceward.inbox.event import Event
from onceward.inbox.gate import AsyncGate, Gate
from onceward.inbox.session import EffectfulSession, InboxSession, Raised

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.inbox.claims import Claim
    from onceward.inbox.effects import Ledger

T = TypeVar("T")


class Session(Protocol):
    """A session as the inbox sees it."""

    event: Event

    async def _enter(self) -> None: ...
    async def _leave(self, error: BaseException | None) -> None: ...
    async def _apply(self, operation: Callable[..., T], *args: Any) -> T:
        """One operation of the store, in the session's transaction."""
        ...


class Ports(Protocol):
    asynchronous: bool
    dialect: Dialect
    gate: Any

    def session(self, event: Event) -> Session: ...
    def effectful(self, event: Event, claim: Claim, ledger: Ledger) -> Session: ...
    async def transact(self, operation: Callable[..., T], *args: Any) -> T:
        """One operation of the store, in a transaction of its own."""
        ...

    async def outside(self, operation: Callable[..., T], *args: Any) -> T:
        """`operation(connection, …)`, which begins and ends its transactions itself."""
        ...

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """User code. What it raises comes as `Raised`."""
        ...

    async def sleep(self, seconds: float) -> None: ...
    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it beside everything else, to its end."""
        ...


SERIALIZATION_RETRIES = 20
LONGEST_PAUSE = 0.25
"""Seconds between two tries after a serialization failure, at most."""


def pause_after(attempt: int) -> float:
    return random.uniform(0, min(LONGEST_PAUSE, 0.005 * 2**attempt))


class _Persistent(ABC):
    """Tries an operation of the store again when only the neighbours of its transaction are to blame."""

    dialect: Dialect

    async def transact(self, operation: Callable[..., T], *args: Any) -> T:
        backend = backend_of(self.dialect)
        for attempt in range(SERIALIZATION_RETRIES - 1):
            try:
                return await self._transact(operation, *args)
            except DBAPIError as error:
                if not backend.is_serialization_failure(error):
                    raise
            await self.sleep(pause_after(attempt))
        return await self._transact(operation, *args)

    @abstractmethod
    async def _transact(self, operation: Callable[..., T], *args: Any) -> T: ...
    @abstractmethod
    async def sleep(self, seconds: float) -> None: ...


class ThreadPorts(_Persistent):
    asynchronous = False

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise ConfigurationError(
                f"Inbox needs an Engine as create_engine makes it from a synchronous driver, not {engine!r}; "
                "an AsyncEngine goes to AsyncInbox"
            )
        self.engine = engine
        self.dialect = engine.dialect
        self.gate = Gate()

    def session(self, event: Event) -> InboxSession:
        return InboxSession(self.engine, event)

    def effectful(self, event: Event, claim: Claim, ledger: Ledger) -> InboxSession:
        return EffectfulSession(self.engine, event, claim, ledger)

    async def _transact(self, operation: Callable[..., T], *args: Any) -> T:
        with DbSession(self.engine) as session:
            return session._run(operation, *args)

    async def outside(self, operation: Callable[..., T], *args: Any) -> T:
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return operation(connection, *args)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            result = function(*args)
        except Exception as error:
            raise Raised(error) from error
        if inspect.iscoroutine(result):
            # It has not run. Committing would lose the event.
            result.close()
            raise Raised(
                TypeError("this inbox runs in threads, and the function is asynchronous; use AsyncInbox")
            )
        return result

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        threading.Thread(target=run_blocking, args=(coroutine,), name="onceward-inbox", daemon=True).start()


class TaskPorts(_Persistent):
    asynchronous = True

    def __init__(self, engine: AsyncEngine) -> None:
        from sqlalchemy.ext.asyncio import AsyncEngine

        if not isinstance(engine, AsyncEngine):
            raise ConfigurationError(
                f"AsyncInbox needs an AsyncEngine as create_async_engine makes it, not {engine!r}; "
                "an Engine goes to Inbox"
            )
        self.engine = engine
        self.dialect = engine.dialect
        self.gate = AsyncGate()
        self._tasks: set[asyncio.Task[None]] = set()

    def session(self, event: Event) -> Session:
        from onceward.inbox.aio import AsyncInboxSession

        return AsyncInboxSession(self.engine, event)

    def effectful(self, event: Event, claim: Claim, ledger: Ledger) -> Session:
        from onceward.inbox.aio import AsyncEffectfulSession

        return AsyncEffectfulSession(self.engine, event, claim, ledger)

    async def _transact(self, operation: Callable[..., T], *args: Any) -> T:
        from onceward.db.aio import AsyncDbSession

        async with AsyncDbSession(self.engine) as session:
            return await session._run(operation, *args)

    async def outside(self, operation: Callable[..., T], *args: Any) -> T:
        async with self.engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")

            def run(plain: Connection) -> T:
                return operation(plain, *args)

            return await connection.run_sync(run)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await function(*args)
        except Exception as error:
            raise Raised(error) from error

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
