"""The rows of a leasing queue, in one SQLite file."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import repeat
from typing import Any, TypeVar

from onceward._time import boot_id, uptime
from onceward.connectors.identities import identity_in, identity_of, pack, summarize
from onceward.connectors.lease_rules import BurialReason, DeadMessage, read_dead_message
from onceward.connectors.leased_deliveries import Held
from onceward.connectors.leases import AvailableRow
from onceward.connectors.sqlite import statements as sql
from onceward.connectors.sqlite.database import Database
from onceward.connectors.sqlite.lines import SqliteLines
from onceward.task.exceptions import ExceptionCategory
from onceward.transaction import Transaction

Values = TypeVar("Values", bound=tuple[Any, ...])


class SqliteLeaseStore(SqliteLines, Database):
    """A `LeaseStore` in one file. `statements` has the SQL."""

    _ahead: float | None = None
    _entrance: sqlite3.Cursor | None = None
    """The cursor whose connection has `statements.ENTRANCE`."""
    _door: sqlite3.Cursor
    """Of the same connection, for `statements.APPEND_ALONE`, which needs no names."""
    _append_alone: str

    def now(self) -> float:
        if not boot_id():
            return time.time()
        if self._ahead is None:
            self._ahead = self._begin_clock()
        return uptime() + self._ahead

    def _forget(self) -> None:
        self._ahead = None

    def _begin_clock(self) -> float:
        """Return how far the clock of the queue is ahead of `uptime`; see `statements.CLOCK`."""
        known = self.cursor.execute(sql.READ_CLOCK).fetchone()
        if known is not None and known[0] == boot_id():
            return float(known[1])
        wall = time.time()
        ahead = wall - uptime()
        self.cursor.execute(sql.BEGIN_CLOCK, (boot_id(), ahead, wall))
        if known is not None:
            self.cursor.execute(sql.END_LEASES, {"now": wall})
            if wall < known[2]:  # then it says nothing about how long a delay has lasted
                self.cursor.execute(sql.END_DELAYS, {"now": wall})
        return ahead

    def append(self, bodies: Sequence[bytes], now: float) -> None:
        cursor = self.cursor
        cursor.executemany(sql.APPEND, zip(repeat(now), bodies))
        cursor.execute(sql.COUNT_APPENDED, (len(bodies),))

    def append_alone(self, bodies: Sequence[bytes], now: float, wait: float) -> bool:
        """Append one message in one statement, which is a transaction of its own. False if there are more, or if this
        is the first transaction of its connection."""
        if len(bodies) != 1:
            return False
        with self.lock:
            cursor = self._take_cursor()
            if len(self._files) == 1:
                return False
            if self._entrance is not cursor:
                for statement in sql.ENTRANCE:
                    self._execute_when_unlocked(cursor, statement, wait)
                self._entrance = cursor
                self._append_alone = sql.named(sql.APPEND_ALONE, self.queue)
                self._door = cursor.connection.cursor()
            self._execute_when_unlocked(self._door, self._append_alone, wait, values=(now, bodies[0]))
            self._check_files()  # as at the end of every transaction
        return True

    def due(self) -> float | None:
        due: float | None = self.cursor.execute(sql.DUE).fetchone()[0]
        return due

    def available(self, now: float, limit: int) -> Sequence[AvailableRow]:
        cursor = self.cursor
        again, ready = sql.AVAILABLE_AGAIN, sql.READY
        if self._in_lines:
            again, ready = sql.FIRST_AGAIN, sql.FIRST_READY
        rows: list[AvailableRow] = cursor.execute(again, (now, limit)).fetchall()
        if len(rows) < limit:
            rows += cursor.execute(ready, (limit - len(rows),)).fetchall()
        if len(rows) < limit:
            rows += cursor.execute(sql.STRANDED, (limit - len(rows),)).fetchall()
        return rows

    def lease(self, rows: Sequence[AvailableRow], token: int, until: float) -> None:
        self.cursor.executemany(sql.LEASE, [(until, token, row[2] + 1, row[3], row[0]) for row in rows])
        if self.queue is not None:  # messages leave it in other transactions, which have no time for this
            self._forget_oldest()

    def extend(self, deliveries: Sequence[Held], until: float) -> Sequence[Held]:
        missed = self._execute_all(sql.EXTEND, [(until, *held) for held in deliveries])
        return [(key, token) for _, key, token in missed]

    def release(self, first: int, last: int, now: float) -> int:
        """End the leases of all deliveries whose token is in this range. Return how many."""
        values = {"now": now, "first": first, "last": last}
        return self.cursor.execute(sql.RELEASE, values).rowcount

    def remove(self, deliveries: Sequence[Held], transactions: Sequence[Transaction]) -> Sequence[Held]:
        missed = (
            self.remove_first(deliveries) if self._in_lines else self._execute_all(sql.REMOVE, deliveries)
        )
        if missed:
            pairs = zip(deliveries, transactions, strict=True)
            transactions = [transaction for held, transaction in pairs if held not in missed]
        if transactions:
            self.cursor.execute(sql.COUNT_DONE, (len(transactions),))
            self.cursor.execute(sql.NOTE_DONE, (pack(map(identity_of, transactions)),))
            self._forget_oldest()
        return missed

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        return self._change_one(sql.GIVE_BACK, visible_at, key, token)

    def hasten(self, key: int) -> None:
        self._change_one(sql.HASTEN, key)

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
        values = (transaction_id, reason, category, error, now, history, key, token)
        copied = self.cursor.execute(sql.COPY_TO_DEAD_LETTERS, values)
        if self._holds_lines and copied.rowcount == 1:
            self.cursor.execute(sql.HOLD_LINE, (copied.lastrowid, key))
        return self.cursor.execute(sql.REMOVE, (key, token)).rowcount == 1

    def counts(self, now: float) -> dict[str, int]:
        counts = self.cursor.execute(sql.COUNTS, {"now": now}).fetchone()
        return dict(zip(("ready", "leased", "delayed", "dead"), counts, strict=True))

    def dead(self, limit: int) -> list[DeadMessage]:
        rows = self.cursor.execute(sql.DEAD_LETTERS, (limit,))
        return [read_dead_message((row[0], row[8]), *row[1:]) for row in rows]

    def forget_dead(self, keys: Sequence[tuple[int, float]]) -> None:
        if found := self._take_dead(keys):
            self.cursor.execute(sql.COUNT_MOVED, (len(found),))
            moved = [(pack([identity_in(body)]), at, sha256(body).digest()) for at, body in found]
            self.cursor.executemany(sql.NOTE_MOVED, moved)
            self._forget_oldest()

    def acknowledge_dead(self, keys: Sequence[tuple[int, float]]) -> None:
        if found := self._take_dead(keys):
            self.cursor.execute(sql.COUNT_DONE, (len(found),))
            self.cursor.execute(sql.NOTE_DONE, (pack(identity_in(body) for _, body in found),))
            self._forget_oldest()

    def _take_dead(self, keys: Sequence[tuple[int, float]]) -> list[tuple[float, bytes]]:
        """Remove them. Return those that had not been removed before."""
        cursor = self.cursor
        found = [row for key in dict.fromkeys(keys) for row in cursor.execute(sql.DEAD_LETTER, key)]
        cursor.executemany(sql.FORGET_DEAD, keys)
        return found

    def _forget_oldest(self) -> None:
        """Forget the oldest ids beyond those that are kept. Their numbers remain."""
        cursor = self.cursor
        while row := cursor.execute(sql.TO_FORGET, (sql.KEPT,)).fetchone():
            cursor.execute(sql.FORGET, (row[0],))
            cursor.execute(sql.COUNT_FORGOTTEN, summarize(row[1]))

    def _execute_all(self, statement: str, rows: Sequence[Values]) -> Sequence[Values]:
        """Execute it for all rows at once. Return the rows that changed nothing; usually there are none, so they
        are searched for only if the count is short."""
        if not rows:
            return ()
        cursor = self.cursor
        cursor.execute(sql.SAVEPOINT)
        if cursor.executemany(statement, rows).rowcount == len(rows):
            cursor.execute(sql.KEEP_SAVEPOINT)
            return ()
        cursor.execute(sql.UNDO_SAVEPOINT)
        return [row for row in rows if not self._change_one(statement, *row)]

    def _change_one(self, statement: str, *values: object) -> bool:
        return self.cursor.execute(statement, values).rowcount == 1
