"""The session for asyncio: the same operations, each run by SQLAlchemy in a greenlet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from onceward.db import operations
from onceward.db.operations import DEFAULT_TIMEOUT, AnyTable, Params, Row, Sql
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")


class AsyncDbSession:
    """One database transaction: `async with AsyncDbSession(engine) as session: …`. All rules are those of `DbSession`.

    A cancellation rolls back. One that comes while the session is ending waits for the end; `committed` then says
    which end it was. Operations of several tasks on one session run one after another.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        if not isinstance(engine, AsyncEngine):
            raise ConfigurationError(
                f"AsyncDbSession needs an AsyncEngine as create_async_engine makes it, not {engine!r}; "
                "an Engine goes to DbSession"
            )
        self._engine = engine
        self._transaction = DbTransaction(engine.sync_engine, type(self).__name__)
        self._turn = asyncio.Lock()

    @property
    def committed(self) -> bool:
        """As `DbSession.committed`."""
        return self._transaction.committed

    async def __aenter__(self) -> Self:
        with self._transaction.opening():
            self._connection: AsyncConnection = await self._engine.connect()
            await self._connection.run_sync(self._transaction.begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _to_its_end(self._end(error))

    async def _end(self, error: BaseException | None) -> None:
        await self._in_turn(partial(self._transaction.end, error))

    async def _run(
        self, operation: Callable[Concatenate[DbTransaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._in_turn(lambda: self._transaction.run(operation, *args, **kwargs))

    async def _in_turn(self, call: Callable[[], T]) -> T:
        async with self._turn:
            self._transaction.check_entered()
            return await self._connection.run_sync(lambda _: call())

    async def execute(self, sql: Sql, params: Params | Sequence[Params] | None = None) -> int:
        """As `DbSession.execute`."""
        return await self._run(operations.execute, sql, params)

    async def execute_scalar(self, sql: Sql, params: Params | None = None) -> Any:
        """As `DbSession.execute_scalar`."""
        return await self._run(operations.execute_scalar, sql, params)

    async def fetch_one(self, sql: Sql, params: Params | None = None) -> Row | None:
        """As `DbSession.fetch_one`."""
        return await self._run(operations.fetch_one, sql, params)

    async def fetch_all(self, sql: Sql, params: Params | None = None) -> list[Row]:
        """As `DbSession.fetch_all`."""
        return await self._run(operations.fetch_all, sql, params)

    async def insert_idempotent(
        self, table: AnyTable, values: Mapping[str, Any], *, key: Sequence[str] | None = None
    ) -> bool:
        """As `DbSession.insert_idempotent`."""
        return await self._run(operations.insert_idempotent, table, values, key)

    async def occ_update(
        self,
        table: AnyTable,
        key: Mapping[str, Any],
        values: Mapping[str, Any],
        *,
        expected: int,
        version_column: str = "version",
    ) -> int:
        """As `DbSession.occ_update`."""
        return await self._run(operations.occ_update, table, key, values, expected, version_column)

    async def lock_row(
        self, table: AnyTable, key: Mapping[str, Any], *, timeout: float = DEFAULT_TIMEOUT
    ) -> Row | None:
        """As `DbSession.lock_row`."""
        return await self._run(operations.lock_row, table, key, timeout)

    async def advisory_lock(self, name: str | int, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        """As `DbSession.advisory_lock`."""
        await self._run(operations.advisory_lock, name, timeout)


async def _to_its_end(ending: Coroutine[Any, Any, None]) -> None:
    """Wait for a session's end, through cancellations; the last of these is raised after it."""
    task = asyncio.create_task(ending)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None or task.cancelled():
        return task.result()
    failure = task.exception()
    if failure is not None:
        raise cancelled from failure
    raise cancelled
