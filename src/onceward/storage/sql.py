"""SQL with `{now}` in it: the server's time where the database has a server, otherwise the time of a given clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, TextClause, text

from onceward.db.operations import key_of
from onceward.db.transaction import DbTransaction

_NOW = {"sqlite": ":now", "postgresql": "extract(epoch FROM clock_timestamp())::double precision"}
"""Seconds since 1970, as SQL."""


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


def wait_for_lock(transaction: DbTransaction, name: str) -> None:
    """Lock the name, waiting if necessary, until the transaction ends."""
    transaction.backend.take_advisory_lock(transaction.connection, key_of(name))


@lru_cache(500)
def _statement(sql: str, now: str) -> TextClause:
    return text(sql.replace("{now}", now))
