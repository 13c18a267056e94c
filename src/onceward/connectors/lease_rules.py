"""The rules of a leasing queue, independent of any store: when to deliver again, when to stop, and what is kept of a
message that is not delivered any more.

Every fetch of a message is a delivery, counted before the fetch returns. A delivery ends when it is settled,
or when its lease expires, for example because its process was killed.
"""

from __future__ import annotations

import math
import random
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, TypedDict, get_args

import msgspec

from onceward._process.stacks import error_stack
from onceward.backoff import Backoff
from onceward.connectors.codec import DecodeError, decode
from onceward.connectors.patience import check_patience
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory, TransactionException, failure_category
from onceward.telemetry.redaction import message_with_notes, redact
from onceward.transaction import Transaction

OnFailure = Literal["auto", "dead_letter", "redeliver"]

LONGEST_DELAY = 600.0
"""Seconds up to which `redelivery_delay` is doubled."""
LONGEST_BLOCKING_DELAY = 60.0
"""The same for a source that never buries: the failed message blocks those after it."""
JITTER = 0.2
"""The random share of a delay, so messages that failed together do not come back together."""
MOST_KILLED = 5
"""Lost deliveries of a message whose starts no inbox counts: it may not kill as many processes as it may fail."""
MOST_LOST = 20
"""Lost deliveries of a message whose consumer counts its own starts. So many are not in flight by chance: it must kill
its processes before they can count."""


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


REASONS = frozenset(map(str, BurialReason))
CATEGORIES = frozenset(map(str, ExceptionCategory))


class Redeliver(msgspec.Struct, frozen=True):
    delay: float
    """Seconds."""


class RedeliveryPlan(msgspec.Struct, frozen=True):
    """What a failure itself says about its next deliveries: see `TransactionException.redelivery`."""

    delays: tuple[float, ...] = ()
    """Seconds before each further delivery; the last one repeats. Empty for those of the source."""
    times: int | None = None
    """How many further deliveries there are; None for as many as the source has."""
    not_before: float = 0.0
    """Seconds that the next delivery waits at least."""

    def least(self, number: int) -> float:
        """The delay after failed delivery `number`, counted from 1, without its random part."""
        return self.delays[min(number, len(self.delays)) - 1]


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
    max_deliveries: int = 17
    """A message that was delivered this often without success becomes a dead letter: with the default delays, more than
    an hour after its first failure. One whose deliveries were never settled, as if it killed its processes, becomes one
    after five. With 1, every message is fetched alone, so one that kills its process does not take others with it."""
    redelivery_delay: float = 1.0
    """Seconds before a failed message comes back; doubled with each delivery, up to ten minutes. Up to a fifth of it,
    at random, is left out."""
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

    def is_exhausted(self, deliveries: int, lost: int) -> bool:
        """Whether a message must not be delivered again. `lost` of its deliveries were never settled."""
        counted = deliveries if self.counts_lost else deliveries - lost
        return counted >= self.max_deliveries or lost >= self.most_lost

    @property
    def counts_lost(self) -> bool:
        """Whether deliveries that were never settled count towards `max_deliveries`."""
        return True

    @property
    def most_lost(self) -> int:
        """How many deliveries may be lost."""
        return min(self.max_deliveries, MOST_KILLED)

    def beside_inbox(self) -> LeaseRules:
        """Return these rules for a consumer whose inbox counts starts."""
        return InboxLeaseRules(**msgspec.structs.asdict(self))

    def after_failure(
        self,
        category: ExceptionCategory | None,
        deliveries: int,
        lost: int = 0,
        redelivery: RedeliveryPlan | None = None,
    ) -> Redeliver | Bury:
        """Decide about a message whose delivery number `deliveries` failed, after `lost` that were never settled."""
        if self.on_failure == "dead_letter":
            return Bury(BurialReason.FAILED)
        if self.on_failure == "auto" and category is ExceptionCategory.BUSINESS:
            return Bury(BurialReason.FAILED)
        if self.is_exhausted(deliveries, lost):
            return Bury(BurialReason.MAX_DELIVERIES)
        if redelivery is None:
            return Redeliver(self.backoff.delay(deliveries - 1))
        if redelivery.times is not None and deliveries > redelivery.times:
            return Bury(BurialReason.MAX_DELIVERIES)
        if redelivery.delays:
            delay = redelivery.least(deliveries) * random.uniform(1, 1 + JITTER)
        else:
            delay = self.backoff.delay(deliveries - 1)
        return Redeliver(max(delay, redelivery.not_before))

    def describe(self, decision: Redeliver | Bury, deliveries: int) -> str:
        """What becomes of a message whose delivery number `deliveries` failed, for the log."""
        if isinstance(decision, Bury):
            return f"delivery {deliveries} failed; it is now a dead letter ({decision.reason})"
        limit = "" if self.max_deliveries == sys.maxsize else f" of {self.max_deliveries}"
        return (
            f"delivery {deliveries}{limit} failed; it will be redelivered in {round(decision.delay, 3):g} s"
        )

    @property
    def backoff(self) -> Backoff:
        """Between the deliveries of one message: doubling, up to ten minutes."""
        cap = LONGEST_BLOCKING_DELAY if self.max_deliveries == sys.maxsize else LONGEST_DELAY
        return Backoff(self.redelivery_delay, cap=max(self.redelivery_delay, cap), jitter=JITTER)

    def check_patience(self, consumer_id: str, tolerates: float, what: str, remedy: str) -> None:
        """Raise `ConfigurationError` if a failing message is buried sooner than its consumer tolerates."""
        if self.max_deliveries < sys.maxsize:
            check_patience(consumer_id, tolerates, self.shortest_delays(), what, remedy)

    def shortest_delays(self, redelivery: RedeliveryPlan | None = None) -> list[float]:
        """The delays of a message that always fails, each as short as chance can make it, up to its dead letter."""
        if self.on_failure == "dead_letter":
            return []
        times = self.max_deliveries - 1
        if redelivery is not None and redelivery.times is not None:
            times = min(times, redelivery.times)
        if redelivery is not None and redelivery.delays:
            return [redelivery.least(number) for number in range(1, times + 1)]
        backoff = msgspec.structs.replace(self.backoff, jitter=0.0)
        return [backoff.delay(number) * (1 - JITTER) for number in range(times)]


class InboxLeaseRules(LeaseRules, frozen=True, kw_only=True):
    """The rules for a consumer whose inbox counts starts, and decides what is poison.

    A delivery that was lost because its process died does not count against a message: it may only have been near the
    one that killed the process.
    """

    @property
    def counts_lost(self) -> bool:
        return False

    @property
    def most_lost(self) -> int:
        return max(self.max_deliveries, MOST_LOST)


class Failure(msgspec.Struct, frozen=True):
    """One failed delivery, as a line of a message's history."""

    at: str
    error: str
    attempt: int | None = None
    category: str | None = None
    where: str | None = None
    """The stack of the handler when it failed, without values; None if it is not known."""


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


class HistoryLine(msgspec.Struct, frozen=True):
    """One line of a stored history: see `describe_failure`."""

    delivery: int
    at: datetime
    error: str = ""
    category: str | None = None
    kind: str | None = None
    where: str | None = None


_history_line = msgspec.json.Decoder(HistoryLine)


def read_dead_message(
    key: Any,
    transaction_id: Any,
    body: bytes,
    reason: Any,
    category: Any,
    error: Any,
    deliveries: Any,
    enqueued_at: Any,
    died_at: Any,
    lines: Any,
) -> DeadMessage:
    """Build it from stored values. `lines` come from `describe_failure`; an id that can be read from `body` replaces
    `transaction_id`. Whatever another program has written there, it is a dead letter: values that cannot be read are
    unknown, and do not hide the letters behind it."""
    try:
        transaction = decode(body)
    except DecodeError:
        transaction = None
    died = _time_of(died_at)
    history: list[Failure] = []
    kind = None
    for line in filter(
        None, str(lines or "").split("\n")
    ):  # not splitlines: JSON leaves other line ends alone
        try:
            known = _history_line.decode(line)
        except (msgspec.DecodeError, ValueError):
            history.append(Failure(died.isoformat(), "a line of its history cannot be read"))
            continue
        history.append(
            Failure(known.at.isoformat(), known.error, known.delivery, known.category, known.where)
        )
        kind = known.kind
    return DeadMessage(
        transaction_id=(transaction_id and str(transaction_id)) if transaction is None else transaction.id,
        transaction=transaction,
        reason=BurialReason(reason) if reason in REASONS else BurialReason.UNDECODABLE,
        category=ExceptionCategory(category) if category in CATEGORIES else None,
        error=error and str(error),
        deliveries=max(int(_number_of(deliveries)), 0),
        enqueued_at=_time_of(enqueued_at),
        died_at=died,
        key=key,
        body=body,
        history=tuple(history),
        kind=kind,
    )


def _number_of(value: Any) -> float:
    """The number; 0 if it is not one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) else 0.0


def _time_of(seconds: Any) -> datetime:
    """The time; 1970 if it is not one."""
    try:
        return datetime.fromtimestamp(_number_of(seconds), UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def describe_failure(
    error: TransactionException | None, delivery: int, at: float
) -> tuple[ExceptionCategory | None, str | None, str]:
    """Return a failure's category, its text, and its line for the message's history: JSON, the same in every store."""
    line: dict[str, Any] = {"delivery": delivery, "at": datetime.fromtimestamp(at, UTC).isoformat()}
    if error is None:
        return None, None, msgspec.json.encode(line).decode() + "\n"
    # Text from outside may contain lone surrogates, which no store accepts.
    text = redact(message_with_notes(error), error).encode("utf-8", "backslashreplace").decode("utf-8")
    if text:
        line["error"] = text
    category = failure_category(error)
    line["category"] = str(category)
    kind = breach_of(error)
    if kind is not None:
        line["kind"] = kind
    where = error_stack(error)
    if where is not None:
        line["where"] = where.encode("utf-8", "backslashreplace").decode("utf-8")
    return category, text, msgspec.json.encode(line).decode() + "\n"


def breach_of(error: BaseException | str | None) -> str | None:
    """The kind of breach, if the error is a `ContractError`."""
    # Not imported: a source needs no inbox, and without it there is no such error.
    inbox = sys.modules.get("onceward.inbox.errors")
    return str(error.kind) if inbox is not None and isinstance(error, inbox.ContractError) else None
