"""The decisions of a leasing queue, independent of any store: when to deliver again, and when to stop.

Every fetch of a message is a delivery, counted before the fetch returns. A delivery ends when it is settled,
or when its lease expires, for example because its process was killed.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from onceward.backoff import Backoff
from onceward.connectors.dead_message import BurialReason
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory

OnFailure = Literal["auto", "dead_letter", "redeliver"]

LEASE = 60.0
MAX_DELIVERIES = 5
REDELIVERY_DELAY = 1.0
"""The defaults of every connector that leases; `LeaseRules` explains them."""
LONGEST_DELAY = 60.0
"""Seconds up to which `redelivery_delay` is doubled."""


class Redeliver(msgspec.Struct, frozen=True):
    delay: float
    """Seconds."""


class Bury(msgspec.Struct, frozen=True):
    reason: BurialReason


class LeaseRules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a leasing queue, and the decisions that follow from them."""

    lease: float = LEASE
    """Seconds a delivery is reserved for its consumer."""
    max_deliveries: int = MAX_DELIVERIES
    """A message that was delivered this often without success becomes a dead letter. With 1, every message
    is fetched alone, so one that kills its process does not take others with it."""
    redelivery_delay: float = REDELIVERY_DELAY
    """Seconds before a failed message comes back; doubled with each delivery, up to a minute."""
    on_failure: OnFailure = "auto"
    """`auto`: business failures become dead letters at once, others are delivered again. `dead_letter`: every
    failure becomes a dead letter at once. `redeliver`: every failure is delivered again."""

    def __post_init__(self) -> None:
        if not 0 < self.lease < math.inf:
            raise ConfigurationError(f"lease must be a positive number of seconds, not {self.lease!r}")
        if not isinstance(self.max_deliveries, int) or self.max_deliveries < 1:
            raise ConfigurationError(f"max_deliveries must be 1 or more, not {self.max_deliveries!r}")
        if not 0 < self.redelivery_delay < math.inf:
            raise ConfigurationError(
                "redelivery_delay must be a positive number of seconds, so a failing message does not "
                f"come back in a hot loop, not {self.redelivery_delay!r}"
            )
        if self.on_failure not in get_args(OnFailure):
            raise ConfigurationError(
                f"on_failure must be one of {', '.join(get_args(OnFailure))}, not {self.on_failure!r}"
            )

    @property
    def suspect_after(self) -> int:
        """Lost leases after which a message is fetched alone: it may be what kills its processes, and must not
        push messages fetched with it to their own `max_deliveries`."""
        return min(2, self.max_deliveries - 1)

    def after_failure(self, category: ExceptionCategory | None, deliveries: int) -> Redeliver | Bury:
        """Decide about a message whose delivery number `deliveries` failed."""
        if self.on_failure == "dead_letter":
            return Bury(BurialReason.FAILED)
        if self.on_failure == "auto" and category is ExceptionCategory.BUSINESS:
            return Bury(BurialReason.FAILED)
        if deliveries >= self.max_deliveries:
            return Bury(BurialReason.MAX_DELIVERIES)
        return Redeliver(self.backoff.delay(deliveries - 1))

    @property
    def backoff(self) -> Backoff:
        """Between the deliveries of one message: doubling, up to a minute."""
        return Backoff(self.redelivery_delay, cap=max(self.redelivery_delay, LONGEST_DELAY))
