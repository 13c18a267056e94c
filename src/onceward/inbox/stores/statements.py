"""Running a statement. `{now}` in it is the database's own time, where it has one that all workers share."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from onceward.db.timed import Timed
from onceward.db.transaction import DbTransaction
from onceward.inbox.stores.rows import Key


class Statements(ABC):
    name: str
    """The dialect, as SQLAlchemy and the folder of migrations call it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timed = Timed(self.name, clock)

    def _one(self, transaction: DbTransaction, sql: str, key: Key, **more: Any) -> Any:
        result = self._run(transaction, sql, consumer=key[0], tracking=key[1], day=key[2], **more)
        return result.first()

    def _execute(self, transaction: DbTransaction, sql: str, key: Key, **more: Any) -> int:
        result = self._run(transaction, sql, consumer=key[0], tracking=key[1], day=key[2], **more)
        return int(result.rowcount)

    def _rows(self, transaction: DbTransaction, sql: str, **values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in self._run(transaction, sql, **values).mappings()]

    def _run(self, transaction: DbTransaction, sql: str, **values: Any) -> Any:
        return self._on(transaction.connection, sql, **values)

    def _on(self, connection: Connection, sql: str, **values: Any) -> Any:
        return self._timed.execute(connection, sql, values)
