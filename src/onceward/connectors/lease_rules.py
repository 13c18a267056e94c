"""The decisions of a leasing queue, apart from any store: when to deliver again, and when to stop.

Every fetch of a message is a delivery, counted before it is handed out. A delivery ends when it is settled,
or when its lease runs out: a start without an end, as a killed process leaves behind.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, get_args

import msgspec

from onceward.backoff import Backoff
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.transaction import Transaction

OnFailure = Literal["auto", "dead_letter", "redeliver"]

LONGEST_DELAY = 60.0
"""Seconds at which the doubling of `redelivery_delay` ends."""


class BurialReason(StrEnum):
    """Why a message became a dead letter."""

    FAILED = "failed"
    """It failed, and the failure rule does not deliver such failures again."""
    MAX_DELIVERIES = "max_deliveries"
    """It was delivered as often as allowed."""
    UNDECODABLE = "undecodable"
    """Its bytes are not a transaction."""
    TRIMMED = "trimmed"
    """Its bytes were removed from the wire before it was done."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that will not be delivered again, kept for people. Its bytes are stored unchanged."""

    transaction_id: str | None
    transaction: Transaction | None
    """None where the bytes cannot be read as a transaction."""
    reason: BurialReason
    category: ExceptionCategory | None
    """Of the last known failure."""
    error: str | None
    deliveries: int
    enqueued_at: datetime
    died_at: datetime


class Exhumed(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter on its way to a place that keeps all of them, with what only its connector knows."""

    key: Any
    """How the connector knows it."""
    body: bytes
    transaction_id: str | None
    reason: BurialReason
    category: ExceptionCategory | None
    error: str | None
    deliveries: int
    enqueued_at: float
    died_at: float
    history: tuple[Mishap, ...]


class Mishap(msgspec.Struct, frozen=True, omit_defaults=True):
    """One failed delivery, as connectors keep it: a line of JSON."""

    delivery: int
    at: str
    error: str = ""
    category: str | None = None
    kind: str | None = None
    """What breach of a contract it was, if it was one."""


def mishap(error: TransactionException | None, delivery: int, at: float) -> str:
    """A line for the history of a message."""
    kind = getattr(error, "kind", None)
    told = Mishap(
        delivery,
        datetime.fromtimestamp(at, UTC).isoformat(),
        as_text(error) or "",
        None if error is None else str(error.category),
        None if kind is None else str(kind),
    )
    return msgspec.json.encode(told).decode() + "\n"


def mishaps(lines: str) -> tuple[Mishap, ...]:
    return tuple(msgspec.json.decode(line, type=Mishap) for line in lines.splitlines() if line)


def as_text(error: BaseException | None) -> str | None:
    # Text from outside may hold half characters, which no store takes.
    return None if error is None else str(error).encode("utf-8", "backslashreplace").decode("utf-8")


class Redeliver(msgspec.Struct, frozen=True):
    delay: float
    """Seconds."""


class Bury(msgspec.Struct, frozen=True):
    reason: BurialReason


class LeaseRules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a leasing queue, and what follows from them."""

    lease: float = 60.0
    """Seconds a delivery is kept from others."""
    max_deliveries: int = 5
    """A message that was delivered so often without success becomes a dead letter. With 1, every message
    is fetched alone, so that one that kills its process takes no other with it."""
    redelivery_delay: float = 1.0
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
                "redelivery_delay must be a positive number of seconds, so that a failing message does not "
                f"come back in a hot loop, not {self.redelivery_delay!r}"
            )
        if self.on_failure not in get_args(OnFailure):
            raise ConfigurationError(
                f"on_failure must be one of {', '.join(get_args(OnFailure))}, not {self.on_failure!r}"
            )

    @property
    def suspect_after(self) -> int:
        """Lost leases after which a message is fetched alone: it may be what kills its processes, and those
        fetched with it must not come to their own `max_deliveries` by its doing."""
        return min(2, self.max_deliveries - 1)

    def after_failure(self, category: ExceptionCategory | None, deliveries: int) -> Redeliver | Bury:
        """What becomes of a message whose delivery number `deliveries` has failed."""
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
