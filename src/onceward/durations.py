"""Durations that read as they are spoken: `key_valid_for=hours(24)`."""

from __future__ import annotations

import math
from datetime import timedelta

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
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"{name} must be a positive duration, such as hours(24) or a timedelta, not {duration!r}"
        )
    if seconds is duration and seconds < PLAIN_SECONDS:
        raise ConfigurationError(
            f"{name}={duration!r} does not say whether these are seconds or hours; write {name}=hours({duration!r}), "
            f"or timedelta(seconds={duration!r}) if you mean seconds"
        )
    return float(seconds)
