"""The session for threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Engine

from onceward.db import operations
from onceward.db.operations import DEFAULT_TIMEOUT, AnyTable, Params, Row, Sql
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError


class DbSession:
    """One database transaction: `with DbSession(engine) as session: …`.

    Leaving the block commits; any exception that leaves it, also KeyboardInterrupt, rolls back and goes on. It
    is entered once: not nested, not again. A second session is a second transaction. It belongs to one thread.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise ConfigurationError(
                f"DbSession needs an Engine as create_engine makes it from a synchronous driver, not {engine!r}; "
                "an AsyncEngine goes to AsyncDbSession"
            )
        self._engine = engine
        self._transaction = DbTransaction(engine, type(self).__name__)
        self._run = self._transaction.run

    @property
    def committed(self) -> bool:
        """Whether the commit is known to have happened. Never before the block has been left."""
        return self._transaction.committed

    def __enter__(self) -> Self:
        with self._transaction.opening():
            self._transaction.begin(self._engine.connect())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transaction.end(error)

    def execute(self, sql: Sql, params: Params | Sequence[Params] | None = None) -> int:
        """Run a statement, once for each dict of a sequence. Returns the rows affected, -1 where nobody knows."""
        return self._run(operations.execute, sql, params)

    def execute_scalar(self, sql: Sql, params: Params | None = None) -> Any:
        """The first column of the first row, or None if there is no row."""
        return self._run(operations.execute_scalar, sql, params)

    def fetch_one(self, sql: Sql, params: Params | None = None) -> Row | None:
        """The only row, or None. Raises RowError if there are more."""
        return self._run(operations.fetch_one, sql, params)

    def fetch_all(self, sql: Sql, params: Params | None = None) -> list[Row]:
        """All rows."""
        return self._run(operations.fetch_all, sql, params)

    def insert_idempotent(
        self, table: AnyTable, values: Mapping[str, Any], *, key: Sequence[str] | None = None
    ) -> bool:
        """Insert a row: True if it was, False if it was there already.

        *There already* means a row with the same `key` columns; without `key`, any violated uniqueness. Every other
        integrity error is raised. Whichever it is, the transaction can go on.
        """
        return self._run(operations.insert_idempotent, table, values, key)

    def occ_update(
        self,
        table: AnyTable,
        key: Mapping[str, Any],
        values: Mapping[str, Any],
        *,
        expected: int,
        version_column: str = "version",
    ) -> int:
        """Update one row if it is at the expected version, and return its new version, the next number.

        Raises OptimisticConflict if the row is at another version or gone. After that, another try in this session
        is refused with RetryRefusedError: end it, open a new one and read again.
        """
        return self._run(operations.occ_update, table, key, values, expected, version_column)

    def lock_row(
        self, table: AnyTable, key: Mapping[str, Any], *, timeout: float = DEFAULT_TIMEOUT
    ) -> Row | None:
        """Lock one row until the session ends and return it; None if there is none, and then nothing is locked.

        Raises LockTimeoutError after `timeout` seconds. On SQLite the session has the whole database anyway.
        """
        return self._run(operations.lock_row, table, key, timeout)

    def advisory_lock(self, name: str | int, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Lock a name, or a number of 64 bits, until the session ends. Taking it twice is taking it once.

        Raises LockTimeoutError after `timeout` seconds. On SQLite the session has the whole database anyway.
        """
        self._run(operations.advisory_lock, name, timeout)
