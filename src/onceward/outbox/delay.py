"""A message that a producer sends later: `yield Delayed(order, delay=minutes(5))`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from onceward.outbox.errors import OutboxError
from onceward.outbox.message import check_due


class Delayed(msgspec.Struct, frozen=True):
    """What a producer returns or yields in place of a payload or transaction, to have it sent when it is due.

    The outbox of the app holds it, whatever its sink is: the sink gets it from the relay. Raises `OutboxError` if
    `delay` (a timedelta, or seconds) and `at` (a datetime with a time zone) are wrong, both given, or both missing.
    """

    payload: Any
    delay: timedelta | float | None = msgspec.field(default=None)
    at: datetime | None = msgspec.field(default=None)
    key: str | None = msgspec.field(default=None)

    def __post_init__(self) -> None:
        if self.delay is None and self.at is None:
            raise OutboxError("nothing was sent: a Delayed needs delay=… or at=…")
        check_due(self.delay, self.at)
