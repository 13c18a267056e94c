"""The rows of a leasing queue, in SQLite. `statements` has the SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from onceward.connectors.dead_message import BurialReason, DeadMessage, read_dead_message
from onceward.connectors.deliveries import Held
from onceward.connectors.leases import AvailableRow
from onceward.connectors.sqlite import statements as sql
from onceward.connectors.sqlite.database import Database
from onceward.task.exceptions import ExceptionCategory

Values = TypeVar("Values", bound=tuple[Any, ...])


class SqliteLeaseStore:
    """A `LeaseStore` in one file."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.transaction = database.transaction
        self.close = database.close

    def append(self, bodies: Sequence[bytes], now: float) -> None:
        cursor = self._database.cursor
        cursor.executemany(sql.APPEND, [(now, body) for body in bodies])
        cursor.execute(sql.COUNT_APPENDED, (len(bodies),))

    def available(self, now: float, limit: int) -> Sequence[AvailableRow]:
        cursor = self._database.cursor
        rows: list[AvailableRow] = cursor.execute(sql.AVAILABLE_AGAIN, (now, limit)).fetchall()
        if len(rows) < limit:
            rows += cursor.execute(sql.READY, (limit - len(rows),)).fetchall()
        return rows

    def lease(self, rows: Sequence[AvailableRow], token: int, until: float) -> None:
        self._database.cursor.executemany(sql.LEASE, [(until, token, row[3], row[0]) for row in rows])

    def extend(self, deliveries: Sequence[Held], until: float) -> Sequence[Held]:
        missed = self._execute_all(sql.EXTEND, [(until, *held) for held in deliveries])
        return [(key, token) for _, key, token in missed]

    def release(self, first: int, last: int, now: float) -> int:
        """End the leases of all deliveries whose token is in this range. Return how many."""
        values = {"now": now, "first": first, "last": last}
        return self._database.cursor.execute(sql.RELEASE, values).rowcount

    def remove(self, deliveries: Sequence[Held]) -> Sequence[Held]:
        missed = self._execute_all(sql.REMOVE, deliveries)
        if len(missed) < len(deliveries):
            self._database.cursor.execute(sql.COUNT_DONE, (len(deliveries) - len(missed),))
        return missed

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        return self._change_one(sql.GIVE_BACK, visible_at, key, token)

    def delay(
        self,
        key: int,
        token: int,
        until: float,
        category: ExceptionCategory | None,
        error: str | None,
        history: str,
    ) -> bool:
        return self._change_one(sql.DELAY, until, category, error, history, key, token)

    def bury(
        self,
        key: int,
        token: int | None,
        now: float,
        reason: BurialReason,
        transaction_id: str | None,
        category: ExceptionCategory | None = None,
        error: str | None = None,
        history: str = "",
    ) -> bool:
        self._change_one(
            sql.COPY_TO_DEAD_LETTERS, transaction_id, reason, category, error, now, history, key, token
        )
        return self._change_one(sql.REMOVE, key, token)

    def counts(self, now: float) -> dict[str, int]:
        counts = self._database.cursor.execute(sql.COUNTS, {"now": now}).fetchone()
        return dict(zip(("ready", "leased", "delayed", "dead"), counts, strict=True))

    def dead(self, limit: int) -> list[DeadMessage]:
        return [
            read_dead_message((row[0], row[8]), *row[1:])
            for row in self._database.cursor.execute(sql.DEAD_LETTERS, (limit,))
        ]

    def forget_dead(self, keys: Sequence[tuple[int, float]]) -> None:
        cursor = self._database.cursor
        cursor.executemany(sql.FORGET_DEAD, keys)
        if cursor.rowcount > 0:  # they may have been removed before
            cursor.execute(sql.COUNT_MOVED, (cursor.rowcount,))

    def _execute_all(self, statement: str, rows: Sequence[Values]) -> Sequence[Values]:
        """Execute it for all rows at once. Return the rows that changed nothing; usually there are none, so they
        are searched for only if the count is short."""
        if not rows:
            return ()
        cursor = self._database.cursor
        cursor.execute(sql.SAVEPOINT)
        if cursor.executemany(statement, rows).rowcount == len(rows):
            cursor.execute(sql.KEEP_SAVEPOINT)
            return ()
        cursor.execute(sql.UNDO_SAVEPOINT)
        return [row for row in rows if not self._change_one(statement, *row)]

    def _change_one(self, statement: str, *values: object) -> bool:
        return self._database.cursor.execute(statement, values).rowcount == 1
