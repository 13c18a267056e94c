"""Running SQL in somebody's transaction, with one text for all databases and the time by the database's own clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.engine import Dialect

from onceward.db.locks import key_of
from onceward.db.timed import Timed
from onceward.db.transaction import DbTransaction


class Rows:
    def __init__(self, dialect: Dialect, clock: Callable[[], float]) -> None:
        self._timed = Timed(dialect.name, clock)
        self.for_update = "" if dialect.name == "sqlite" else " FOR UPDATE"
        """At the end of a query: nobody changes its rows until the transaction ends. In SQLite nobody can anyway."""

    def run(self, transaction: DbTransaction, sql: str, **values: Any) -> Any:
        return self._timed.execute(transaction.connection, sql, values)

    def many(self, transaction: DbTransaction, sql: str, values: list[dict[str, Any]]) -> None:
        """Run it once for each."""
        if values:
            self._timed.execute_each(transaction.connection, sql, values)

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

    def lock(self, transaction: DbTransaction, name: str) -> None:
        """Wait for the name, and keep it until the transaction ends."""
        transaction.backend.take_advisory_lock(transaction.connection, key_of(name))
