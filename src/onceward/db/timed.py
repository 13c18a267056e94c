"""SQL with `{now}` in it: the database's own time where all workers share one, otherwise that of a given clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, TextClause, text

_NOW = {"sqlite": ":now", "postgresql": "extract(epoch FROM clock_timestamp())::double precision"}
"""Seconds since 1970, as SQL."""


class Timed:
    """Runs statements of one text for all databases."""

    def __init__(self, dialect: str, clock: Callable[[], float]) -> None:
        self._now = _NOW[dialect]
        self._clock = clock if self._now == ":now" else None

    def execute(self, connection: Connection, sql: str, values: dict[str, Any]) -> Any:
        """SQLAlchemy passes over values that the statement does not name."""
        return connection.execute(_statement(sql, self._now), values | self._time())

    def execute_each(self, connection: Connection, sql: str, values: list[dict[str, Any]]) -> None:
        time = self._time()
        connection.execute(_statement(sql, self._now), [each | time for each in values])

    def _time(self) -> dict[str, float]:
        return {} if self._clock is None else {"now": self._clock()}


@lru_cache(500)
def _statement(sql: str, now: str) -> TextClause:
    return text(sql.replace("{now}", now))
