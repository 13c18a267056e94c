"""A message that its source will not deliver again, and the failures that led there."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from onceward.connectors.codec import DecodeError, decode
from onceward.task.exceptions import ExceptionCategory, TransactionException, failure_category
from onceward.transaction import Transaction


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
    if not hasattr(error, "kind"):
        return None
    # Imported lazily: a source needs no inbox, and few errors get here.
    from onceward.inbox.errors import ContractError

    return str(error.kind) if isinstance(error, ContractError) else None
