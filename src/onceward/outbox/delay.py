"""A message that a producer sends later: `yield Delayed(order, delay=minutes(5))`."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from onceward.outbox.errors import OutboxError


class Delayed(msgspec.Struct, frozen=True):
    """A producer returns or yields this instead of a payload or transaction, to send it when it is due.

    The app's outbox keeps it until then, and the relay sends it to the sink. Raises `OutboxError` if `delay` (a
    timedelta, or seconds) and `at` (a datetime with a time zone) are wrong, both given, or both missing.
    """

    payload: Any
    delay: timedelta | float | None = msgspec.field(default=None)
    at: datetime | None = msgspec.field(default=None)
    key: str | None = msgspec.field(default=None)

    def __post_init__(self) -> None:
        if self.delay is None and self.at is None:
            raise OutboxError("nothing was sent: a Delayed needs delay=… or at=…")
        check_due(self.delay, self.at)


def check_due(delay: Any, at: Any) -> tuple[float | None, float | None]:
    """Return the seconds to wait, or the time when it is due; neither if it need not wait. Raises `OutboxError` if they
    are wrong."""
    if delay is not None and at is not None:
        raise OutboxError("nothing was sent: give delay or at, not both")
    if at is not None:
        if not isinstance(at, datetime) or at.utcoffset() is None:
            raise OutboxError(
                "nothing was sent: at must be a datetime with a time zone, such as "
                f"datetime(2030, 1, 31, 9, tzinfo=UTC), not {at!r}"
            )
        try:
            return None, at.astimezone(UTC).timestamp()
        except OverflowError:
            raise OutboxError(f"nothing was sent: in UTC, at={at} is outside the years 1 to 9999") from None
    if delay is None:
        return None, None
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise OutboxError(
            f"nothing was sent: delay must be a timedelta, such as minutes(5), or a number of seconds, 0 or more, not "
            f"{delay!r}"
        )
    try:
        datetime.now(UTC) + timedelta(seconds=seconds)
    except OverflowError:
        raise OutboxError(f"nothing was sent: a delay of {delay!r} ends after the year 9999") from None
    return float(seconds) or None, None
