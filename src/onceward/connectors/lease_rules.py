"""The rules of a leasing queue, independent of any store: when to deliver again, when to stop, and what is kept of a
message that is not delivered any more.

Every fetch of a message is a delivery, counted before the fetch returns. A delivery ends when it is settled,
or when its lease expires, for example because its process was killed.
"""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, TypedDict, get_args

import msgspec

from onceward.backoff import Backoff
from onceward.connectors.codec import DecodeError, decode
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory, TransactionException, failure_category
from onceward.transaction import Transaction

OnFailure = Literal["auto", "dead_letter", "redeliver"]

LONGEST_DELAY = 60.0
"""Seconds up to which `redelivery_delay` is doubled."""


class BurialReason(StrEnum):
    """Why a message became a dead letter."""

    FAILED = "failed"
    """It failed, and the failure rule does not redeliver such failures."""
    MAX_DELIVERIES = "max_deliveries"
    """It was delivered as often as allowed."""
    UNDECODABLE = "undecodable"
    """Its bytes are not a transaction."""
    TRIMMED = "trimmed"
    """Its bytes were removed from the source before it was done."""


class Redeliver(msgspec.Struct, frozen=True):
    delay: float
    """Seconds."""


class Bury(msgspec.Struct, frozen=True):
    reason: BurialReason


class LeaseSettings(TypedDict, total=False):
    """The fields of `LeaseRules`, as keyword arguments of a connector."""

    lease: float
    max_deliveries: int
    redelivery_delay: float
    on_failure: OnFailure


class LeaseRules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a leasing queue, and the decisions that follow from them."""

    lease: float = 60.0
    """Seconds a delivery is reserved for its consumer."""
    max_deliveries: int = 5
    """A message that was delivered this often without success becomes a dead letter. With 1, every message
    is fetched alone, so one that kills its process does not take others with it."""
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

    def describe_next(self, error: TransactionException | None, deliveries: int) -> str:
        """What becomes of a message whose delivery number `deliveries` failed, for the log."""
        category = None if error is None else failure_category(error)
        decision = self.after_failure(category, deliveries)
        if isinstance(decision, Bury):
            return f"delivery {deliveries} failed; it is now a dead letter ({decision.reason})"
        limit = "" if self.max_deliveries == sys.maxsize else f" of {self.max_deliveries}"
        return f"delivery {deliveries}{limit} failed; it will be redelivered in {decision.delay:.3g} s"

    @property
    def backoff(self) -> Backoff:
        """Between the deliveries of one message: doubling, up to a minute."""
        return Backoff(self.redelivery_delay, cap=max(self.redelivery_delay, LONGEST_DELAY))


class Failure(msgspec.Struct, frozen=True):
    """One failed delivery, as a line of a message's history."""

    at: str
    error: str
    attempt: int | None = None
    category: str | None = None


class DeadMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter that is still in its source, with its bytes unchanged."""

    transaction_id: str | None
    transaction: Transaction | None
    """None if the bytes cannot be decoded."""
    reason: BurialReason
    category: ExceptionCategory | None
    """Of the last known failure."""
    error: str | None
    deliveries: int
    enqueued_at: datetime
    died_at: datetime
    key: Any = None
    """Identifies it in its source; `forget_dead` takes it."""
    body: bytes = b""
    history: tuple[Failure, ...] = ()
    """Every failed delivery that was settled, oldest first."""
    kind: str | None = None
    """The kind of contract breach, if the last failure was one."""


def read_dead_message(
    key: Any,
    transaction_id: str | None,
    body: bytes,
    reason: str,
    category: str | None,
    error: str | None,
    deliveries: int,
    enqueued_at: float,
    died_at: float,
    lines: str,
) -> DeadMessage:
    """Build it from stored values. `lines` come from `describe_failure`; an id that can be read from `body` replaces
    `transaction_id`."""
    try:
        transaction = decode(body)
    except DecodeError:
        transaction = None
    history: list[Failure] = []
    kind = None
    for line in filter(None, lines.split("\n")):  # not splitlines: JSON leaves other line ends as they are
        known = msgspec.json.decode(line)
        history.append(Failure(known["at"], known.get("error", ""), known["delivery"], known.get("category")))
        kind = known.get("kind")
    return DeadMessage(
        transaction_id=transaction_id if transaction is None else transaction.id,
        transaction=transaction,
        reason=BurialReason(reason),
        category=ExceptionCategory(category) if category else None,
        error=error,
        deliveries=deliveries,
        enqueued_at=datetime.fromtimestamp(enqueued_at, UTC),
        died_at=datetime.fromtimestamp(died_at, UTC),
        key=key,
        body=body,
        history=tuple(history),
        kind=kind,
    )


def describe_failure(
    error: TransactionException | None, delivery: int, at: float
) -> tuple[ExceptionCategory | None, str | None, str]:
    """Return a failure's category, its text, and its line for the message's history: JSON, the same in every store."""
    line: dict[str, Any] = {"delivery": delivery, "at": datetime.fromtimestamp(at, UTC).isoformat()}
    if error is None:
        return None, None, msgspec.json.encode(line).decode() + "\n"
    # Text from outside may contain lone surrogates, which no store accepts.
    text = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    if text:
        line["error"] = text
    category = failure_category(error)
    line["category"] = str(category)
    kind = breach_of(error)
    if kind is not None:
        line["kind"] = kind
    return category, text, msgspec.json.encode(line).decode() + "\n"


def breach_of(error: BaseException | str | None) -> str | None:
    """The kind of breach, if the error is a `ContractError`."""
    # Not imported: a source needs no inbox, and without it there is no such error.
    inbox = sys.modules.get("onceward.inbox.errors")
    return str(error.kind) if inbox is not None and isinstance(error, inbox.ContractError) else None
