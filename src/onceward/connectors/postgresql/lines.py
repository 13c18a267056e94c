"""The lines of a queue in PostgreSQL: see `onceward.connectors.lines`.

A message that is gone leaves its place behind, until the next fetch finds that out. Numbers of messages are never given
twice, so the place cannot become that of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from onceward.connectors.leases import WRITE_WAIT, AvailableRow
from onceward.connectors.lines import are_first
from onceward.connectors.postgresql import statements as sql
from onceward.connectors.postgresql.schema import LINES


def as_array(values: Sequence[int | bool]) -> str:
    """An array of numbers, or of truth values, as PostgreSQL reads it. The driver takes five times as long."""
    return f"{{{','.join(map(str, values))}}}"


class PostgreSqlLines:
    """The part of a store that keeps lines."""

    queue: str
    _run: Callable[..., Any]
    _rows: Callable[..., list[Any]]
    transaction: Callable[[float], AbstractContextManager[None]]
    _in_lines = False
    _holds_lines = False

    def begin_lines(self, hold_dead: bool) -> None:
        if not self._run(sql.HAS_LINES).scalar_one():  # the queues are older than lines
            self._run(sql.LOCK_LINES, ("",)).close()
            for statement in LINES:
                self._run(statement.replace("onceward_queue_turns (", "{s}.onceward_queue_turns (")).close()
        self._in_lines, self._holds_lines = True, hold_dead

    def advance_lines(self) -> None:
        self._run(sql.LOCK_LINES, (self.queue,)).close()
        keys = [key for (key,) in self._rows(sql.LEAVE_LINES, (self.queue,)) if key is not None]
        if keys:
            self._run(sql.COME_FIRST, {"queue": self.queue, "keys": keys}).close()

    def has_parked(self) -> bool:
        """Whether a message waits in line for another."""
        with self.transaction(WRITE_WAIT):
            return bool(self._run(sql.HAS_PARKED, (self.queue,)).scalar_one())

    def end_lines(self) -> bool:
        """Make those available that a consumer with order has left in line. Return whether there were any."""
        if not self.has_parked():
            return False
        with self.transaction(WRITE_WAIT):
            self._run(sql.LOCK_LINES, (self.queue,)).close()
            self._run(sql.END_LINES, (self.queue,)).close()
            self._run(sql.UNPARK, (self.queue,)).close()
        return True

    def newcomers(self, now: float, limit: int) -> Sequence[AvailableRow]:
        return self._rows(sql.NEWCOMERS, (self.queue, limit))

    def line_up(self, newcomers: Sequence[tuple[int, str | None]], now: float) -> Sequence[bool]:
        keys = [key for _, key in newcomers]
        known = {key for key in keys if key is not None}
        taken = self._rows(sql.LINES_OF, {"queue": self.queue, "keys": list(known)})
        first = are_first(newcomers, {key for (key,) in taken})
        places = [seq for seq, _ in newcomers]
        self._run(sql.LINE_UP, (self.queue, as_array(places), keys, as_array(first))).close()
        parked = [seq for seq, is_first in zip(places, first, strict=True) if not is_first]
        if parked:
            self._run(sql.PARK, (self.queue, as_array(parked))).close()
        return first

    def behind(self, key: str, limit: int) -> tuple[int, Sequence[bytes]]:
        waiting: int = self._run(sql.COUNT_BEHIND, (self.queue, key)).scalar_one()
        return waiting, [body for (body,) in self._run(sql.BEHIND, (self.queue, key, limit))]
