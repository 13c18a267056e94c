"""A schedule: when its slots are, and which of those that were missed are made up for. Pure, except for time zones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any, Literal, get_args
from zoneinfo import ZoneInfo

import msgspec

from onceward.errors import ConfigurationError

CatchUp = Literal["last", "all", "none"]
"""What becomes of slots that passed while no process ran: only the last is published, or all of them, or none."""
PUNCTUAL = 60.0
"""Seconds that a slot may be late and still count as not missed."""
MOST_AT_ONCE = 1000
"""Slots of one schedule that are published together. More follow at the next look."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_INTERVAL = re.compile(r"\s*(\d+)\s*([smhd])\s*")

Slots = Callable[[datetime], Iterator[datetime]]
"""Returns the slots after a time, earliest first, in UTC."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A name, its slots, and what is sent for each of them."""

    name: str
    slots: Slots
    catch_up: CatchUp
    text: str
    """The interval or the cron expression, for people."""
    target: Callable[..., Any]
    """The function of the app that its messages go to."""
    payload: Callable[[datetime], Any]
    """Returns what is sent for a slot."""
    runs_code: bool = False
    """Whether `payload` is code of the app, which may take long, use a database, raise or exit."""
    headers: dict[str, Any]

    def next(self, after: datetime) -> datetime | None:
        """The first slot after a time; None if there is no more."""
        return next(self.slots(after), None)

    def due(
        self, after: datetime, now: datetime, tried: datetime | None = None
    ) -> tuple[list[datetime], datetime]:
        """Return the slots to publish, and the last slot that is dealt with: the next look starts after it. `tried` is
        a slot that failed, which nobody has missed."""
        if self.catch_up == "all":
            # Code is called for one slot at a time, so what it has done is not done again if it fails.
            passed = list(islice(self._until(after, now), 1 if self.runs_code else MOST_AT_ONCE))
            return passed, passed[-1] if passed else after
        last = self._last(after, now)
        if last is None:
            return [], after
        is_missed = (now - last).total_seconds() > PUNCTUAL and last != tried
        return ([] if self.catch_up == "none" and is_missed else [last]), last

    def _last(self, after: datetime, now: datetime) -> datetime | None:
        """The last slot up to now, found by looking back further and further: there may be millions since `after`."""
        back = timedelta(minutes=1)
        while True:
            start = after if now - after <= back else now - back
            passed = list(self._until(start, now))
            if passed or start == after:
                return passed[-1] if passed else None
            back *= 2

    def _until(self, after: datetime, now: datetime) -> Iterator[datetime]:
        return takewhile(lambda slot: slot <= now, self.slots(after))


def every(interval: str | timedelta) -> Slots:
    """The multiples of an interval since 1970, so all processes agree on them."""
    seconds = seconds_of(interval)

    def slots(after: datetime) -> Iterator[datetime]:
        number = int(after.timestamp() // seconds) + 1
        while True:
            try:
                yield datetime.fromtimestamp(number * seconds, UTC)
            except (OverflowError, ValueError):  # after the year 9999
                return
            number += 1

    return slots


def cron(expression: str, tz: str | None) -> Slots:
    """The times of a cron expression in a time zone."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigurationError(
            "@app.cron needs the package cronsim; pip install 'onceward[schedules]', or use @app.every"
        ) from None
    zone = _zone(tz)

    def slots(after: datetime) -> Iterator[datetime]:
        # In the second pass of an hour that exists twice, CronSim begins with slots of the first.
        found = (slot.astimezone(UTC) for slot in CronSim(expression, after.astimezone(zone)))
        return (slot for slot in found if slot > after)

    try:
        if not isinstance(expression, str):
            raise CronSimError(f"it is of type {type(expression).__name__}")
        CronSim(expression, datetime.now(zone))
    except CronSimError as error:
        raise ConfigurationError(
            f"{expression!r} is not a cron expression ({error}); write five fields: minute, hour, day of the month, "
            "month, day of the week, as in '0 3 * * *' for every night at three"
        ) from None
    return slots


def seconds_of(interval: Any) -> int:
    """The seconds of "30s", "5m", "24h", "7d" or a timedelta. Raises `ConfigurationError` for anything else."""
    seconds: float = 0
    if isinstance(interval, timedelta):
        seconds = interval.total_seconds()
    elif isinstance(interval, str) and (found := _INTERVAL.fullmatch(interval)):
        seconds = int(found[1]) * UNITS[found[2]]
    if seconds < 1 or seconds != int(seconds) or seconds > 1e9:
        raise ConfigurationError(
            f"{interval!r} is not an interval of whole seconds; write '30s', '5m', '24h', '7d' or a timedelta"
        )
    return int(seconds)


def check_is_called(given: Any, example: str) -> None:
    """Refuse the function below a decorator that was left without its parentheses."""
    if callable(given):
        raise ConfigurationError(
            f"a schedule needs its times: write {example} above the consumer or producer"
        )


def check_catch_up(value: Any) -> CatchUp:
    if value not in get_args(CatchUp):
        raise ConfigurationError(f"catch_up must be 'last', 'all' or 'none', not {value!r}")
    return value  # type: ignore[no-any-return]


def _zone(name: Any) -> ZoneInfo:
    if name is None:
        return ZoneInfo("UTC")
    if not isinstance(name, str):
        raise ConfigurationError(
            f"tz must be the name of a time zone, such as 'Europe/Berlin', not a {type(name).__name__}"
        )
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ConfigurationError(
            f"there is no time zone {name!r}; write one such as 'Europe/Berlin' (on a system without time zones: "
            "pip install tzdata)"
        ) from None
