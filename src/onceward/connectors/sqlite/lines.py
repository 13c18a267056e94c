"""The lines of a queue in SQLite: see `onceward.connectors.lines`."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from onceward.connectors.sqlite import statements as sql


class SqliteLines:
    """The part of a store that keeps lines."""

    cursor: sqlite3.Cursor
    _in_lines = False
    _holds_lines = False

    def begin_lines(self, hold_dead: bool) -> None:
        for statement in sql.LINES:
            self.cursor.execute(statement)
        self._in_lines, self._holds_lines = True, hold_dead

    def advance_lines(self) -> None:
        """Triggers do that."""

    def newcomers(self, now: float, limit: int) -> Sequence[tuple[int, bytes]]:
        rows: list[tuple[int, bytes]] = self.cursor.execute(sql.NEW_AGAIN, (now, limit)).fetchall()
        if len(rows) < limit:
            rows += self.cursor.execute(sql.NEW_READY, (limit - len(rows),)).fetchall()
        return rows

    def line_up(self, newcomers: Sequence[tuple[int, str | None]]) -> None:
        last: int = self.cursor.execute(sql.TAKE_TURNS, (len(newcomers),)).fetchone()[0]
        rows = [
            (seq, last - len(newcomers) + place, key) for place, (seq, key) in enumerate(newcomers, start=1)
        ]
        self.cursor.executemany(sql.LINE_UP, rows)
        self.cursor.executemany(sql.PARK, [(seq, key, turn) for seq, turn, key in rows if key is not None])

    def behind(self, key: str, limit: int) -> tuple[int, Sequence[bytes]]:
        waiting: int = self.cursor.execute(sql.COUNT_BEHIND, (key,)).fetchone()[0]
        return waiting, [body for (body,) in self.cursor.execute(sql.BEHIND, (key, limit))]
