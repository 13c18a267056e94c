"""Columns that the database fills in: numbers, times and random values.

A default alone does not tell who gave a value: a handler may pass its own. So a column with a default that makes a time
or a UUID is *doubtful*, until two clean deliveries have shown whether its values change by themselves.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, date, datetime
from enum import Enum
from typing import Any

_RANDOM = re.compile(r"random", re.IGNORECASE)
_SERIAL = re.compile(r"nextval", re.IGNORECASE)
_DOUBTFUL = re.compile(
    r"\bnow\s*\(|current_|localtime|_timestamp\s*\(|uuid|strftime|\b(date)?time\s*\(|\bdate\s*\(|julianday|unixepoch|timeofday",
    re.IGNORECASE,
)
NOW = "<about now>"
"""Stands for a time that the database, or a handler, may have read from a clock."""
_DAY = 86_400
_AROUND = _DAY
"""Seconds: in any time zone."""
_JULIAN_1970 = 2440587.5


class Filled(Enum):
    """How a column gets a value that no statement gives."""

    NUMBER = "counted by the database"
    RANDOM = "different each time"
    DOUBTFUL = "a time or a UUID, if the handler gives none"


def filled_by(default: object, *, counts: bool) -> Filled | None:
    """How the database fills a column with this default. `counts`: as a key that it numbers."""
    said = str(default or "")
    if counts or _SERIAL.search(said):
        return Filled.NUMBER
    if _RANDOM.search(said) and "random_uuid" not in said.lower():
        return Filled.RANDOM
    return Filled.DOUBTFUL if _DOUBTFUL.search(said) else None


def without_clock(value: Any) -> Any:
    """The value, or `NOW` if it is a time of about now."""
    return NOW if any(abs(each - time.time()) < _AROUND for each in _seconds(value)) else value


def _seconds(value: Any) -> tuple[float, ...]:
    """The times that a value of a column may mean, in seconds since 1970."""
    if isinstance(value, datetime):
        return ((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp(),)
    if isinstance(value, date):
        return (datetime(value.year, value.month, value.day, 12, tzinfo=UTC).timestamp(),)
    try:
        if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
            return _seconds(datetime.fromisoformat(value))
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return ()
    return number, number / 1e3, number / 1e6, (number - _JULIAN_1970) * _DAY
