"""The session for asyncio."""

# make faces writes session.py, with
#   port: apply
#   text: "A cancellation … after another." → "It belongs to one thread."

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from onceward.db import operations
from onceward.db.operations import DEFAULT_TIMEOUT, AnyTable, Params, Row, Sql
from onceward.db.transaction_asyncio import AsyncSessionPort

T = TypeVar("T")


class AsyncDbSession:
    """One database transaction: `async with AsyncDbSession(engine) as session: …`.

    Leaving the block commits; any exception that leaves it, even KeyboardInterrupt, rolls back and propagates. A
    session is entered once: neither nested nor reused. A second session is a second transaction.

    A cancellation rolls back. If it arrives while the session is ending, it waits for the end; `committed` then says
    whether the session committed. Operations of several tasks on one session run one after another.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.port = AsyncSessionPort(engine, type(self).__name__)
        """For code that serves both modes: its `enter` and `leave` are coroutines in both, as is `apply` here."""
        self.run = self.port.run
        """`await session.run(operation, …)` calls `operation(transaction, …)`: what other methods are made of."""

    @classmethod
    def within(cls, engine: AsyncEngine, port: AsyncSessionPort) -> Self:
        """A session whose transaction is `port`, a part of another."""
        session = cls.__new__(cls)
        session._engine, session.port, session.run = engine, port, port.run
        return session

    @property
    def committed(self) -> bool:
        """Whether the commit is known to have happened. Always False inside the block."""
        return self.port.committed

    async def __aenter__(self) -> Self:
        await self.port.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.port.__aexit__(kind, error, trace)

    async def execute(self, sql: Sql, params: Params | Sequence[Params] | None = None) -> int:
        """Run a statement, once for each dict of a sequence. Returns the rows affected, or -1 if unknown."""
        return await self.run(operations.execute, sql, params)

    async def execute_scalar(self, sql: Sql, params: Params | None = None) -> Any:
        """Return the first column of the first row, or None if there is no row."""
        return await self.run(operations.execute_scalar, sql, params)

    async def fetch_one(self, sql: Sql, params: Params | None = None) -> Row | None:
        """Return the only row, or None. Raises RowError if there are more."""
        return await self.run(operations.fetch_one, sql, params)

    async def fetch_all(self, sql: Sql, params: Params | None = None) -> list[Row]:
        """Return all rows."""
        return await self.run(operations.fetch_all, sql, params)

    async def insert_idempotent(
        self, table: AnyTable, values: Mapping[str, Any], *, key: Sequence[str] | None = None
    ) -> bool:
        """Insert a row. Returns True if it was inserted, False if it already existed.

        It already exists if a row has the same `key` columns; without `key`, if any uniqueness constraint is violated.
        Every other integrity error is raised. The transaction can continue in either case.
        """
        return await self.run(operations.insert_idempotent, table, values, key)

    async def occ_update(
        self,
        table: AnyTable,
        key: Mapping[str, Any],
        values: Mapping[str, Any],
        *,
        expected: int,
        version_column: str = "version",
    ) -> int:
        """Update one row if it is at the expected version, and return its new version, `expected + 1`.

        Raises OptimisticConflict if the row is at another version or gone. After that, another try in this session
        raises RetryRefusedError: end it, open a new one and read again.
        """
        return await self.run(operations.occ_update, table, key, values, expected, version_column)

    async def lock_row(
        self, table: AnyTable, key: Mapping[str, Any], *, timeout: float = DEFAULT_TIMEOUT
    ) -> Row | None:
        """Lock one row until the session ends and return it. Returns None, and locks nothing, if there is no such row.

        Raises LockTimeoutError after `timeout` seconds. On SQLite a session already locks the whole database.
        """
        return await self.run(operations.lock_row, table, key, timeout)

    async def advisory_lock(self, name: str | int, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Lock a name, or a 64-bit number, until the session ends. Taking it twice is the same as once.

        Raises LockTimeoutError after `timeout` seconds. On SQLite a session already locks the whole database.
        """
        await self.run(operations.advisory_lock, name, timeout)

    async def apply(self, operation: Callable[..., T], *args: Any) -> T:
        """`run`, as a coroutine in both modes."""
        return await self.run(operation, *args)
