"""Durations that read as they are spoken: `key_valid_for=hours(24)`."""

from __future__ import annotations

import math
import re
import sys
from datetime import timedelta
from typing import Any

from onceward.errors import ConfigurationError

Duration = timedelta | float
"""A timedelta, as `hours(24)` returns it, or a large number of seconds."""
PLAIN_SECONDS = 3600
"""The least number that counts as seconds. A smaller one may as well be meant as hours or minutes."""


def minutes(number: float) -> timedelta:
    """Return a duration of so many minutes."""
    return timedelta(minutes=number)


def hours(number: float) -> timedelta:
    """Return a duration of so many hours."""
    return timedelta(hours=number)


def days(number: float) -> timedelta:
    """Return a duration of so many days."""
    return timedelta(days=number)


def seconds_of(duration: Duration, name: str) -> float:
    """Return the seconds of a positive duration; `name` is what it is called in the error."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST:
        raise ConfigurationError(
            f"{name} must be a positive duration, such as hours(24) or a timedelta, not {duration!r}"
        )
    if seconds is duration and seconds < PLAIN_SECONDS:
        raise ConfigurationError(
            f"{name}={duration!r} does not say whether these are seconds or hours; write {name}=hours({duration!r}), "
            f"or timedelta(seconds={duration!r}) if you mean seconds"
        )
    return float(seconds)


_LONGEST = sys.float_info.max
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(duration: Any, name: str, *, at_most: float = math.inf) -> float:
    """Return the seconds of "500ms", "30s", "5m", "1h", a timedelta or a number of seconds; `name` is for the error."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, str) and (found := _TEXT.fullmatch(seconds)):
        seconds = float(found[1]) * _UNITS[found[2]]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST:
        raise ConfigurationError(
            f"{name} must be a positive duration such as '30s', '5m', a timedelta or a number of seconds, not "
            f"{duration!r}"
        )
    if seconds > at_most:
        raise ConfigurationError(
            f"{name} is {format_seconds(seconds)}, but at most {format_seconds(at_most)} is possible"
        )
    return float(seconds)


def is_duration(value: Any) -> bool:
    """Whether a value reads as a duration."""
    if isinstance(value, str):
        return _TEXT.fullmatch(value) is not None
    return isinstance(value, int | float | timedelta)


def is_past(duration: Any) -> bool:
    """Whether a duration is not positive."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds <= 0


def format_seconds(seconds: float) -> str:
    """A duration for people: "1h 2m", "45s", "0.4s"."""
    if seconds == math.inf:
        return "no limit"
    if seconds < 60:
        return f"{seconds:.3g}s"
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next(at for at, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number}{unit}" for number, unit in parts[first : first + 2] if number)
