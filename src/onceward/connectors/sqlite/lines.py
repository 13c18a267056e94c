"""The lines of a queue in SQLite: see `onceward.connectors.lines`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from onceward.connectors.leased_deliveries import Held
from onceward.connectors.leases import AvailableRow
from onceward.connectors.lines import are_first
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

    def newcomers(self, now: float, limit: int) -> Sequence[AvailableRow]:
        rows: list[AvailableRow] = self.cursor.execute(sql.NEW_AGAIN, (now, limit)).fetchall()
        if len(rows) < limit:
            rows += self.cursor.execute(sql.NEW_READY, (limit - len(rows),)).fetchall()
        return rows

    def line_up(self, newcomers: Sequence[tuple[int, str | None]], now: float) -> Sequence[bool]:
        last: int = self.cursor.execute(sql.TAKE_TURNS, (len(newcomers),)).fetchone()[0]
        keys = json.dumps([key for _, key in newcomers if key is not None])
        first = are_first(newcomers, {key for (key,) in self.cursor.execute(sql.TAKEN, (keys,))})
        turns = range(last - len(newcomers) + 1, last + 1)
        self.cursor.executemany(
            sql.LINE_UP, [(seq, turn, key) for turn, (seq, key) in zip(turns, newcomers, strict=True)]
        )
        parked = [(seq,) for (seq, _), is_first in zip(newcomers, first, strict=True) if not is_first]
        self.cursor.executemany(sql.PARK, parked)
        return first

    def remove_first(self, deliveries: Sequence[Held]) -> Sequence[Held]:
        """As `LeaseStore.remove`, for a queue with lines."""
        by_token: dict[int, list[int]] = {}
        for seq, token in deliveries:
            by_token.setdefault(token, []).append(seq)
        removed: set[Held] = set()
        for token, seqs in by_token.items():
            found = self.cursor.execute(sql.REMOVE_FIRST, (json.dumps(seqs), token)).fetchall()
            removed.update((seq, token) for (seq,) in found)
        return [held for held in deliveries if held not in removed]

    def behind(self, key: str, limit: int) -> tuple[int, Sequence[bytes]]:
        waiting: int = self.cursor.execute(sql.COUNT_BEHIND, (key,)).fetchone()[0]
        return waiting, [body for (body,) in self.cursor.execute(sql.BEHIND, (key, limit))]
