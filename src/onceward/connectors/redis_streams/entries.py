"""What stands in an entry: names and values as Redis sends them, and a dead letter among them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from onceward.connectors.codec import DecodeError, decode
from onceward.connectors.rules import BurialReason, DeadLetter, Exhumed, mishaps
from onceward.task.exceptions import ExceptionCategory


def body_of(fields: Sequence[Any]) -> Any:
    """The field `body` of a flat list of names and values, where it usually stands; None if it is not there."""
    if len(fields) == 4 and fields[2] == b"body":
        return fields[3]
    return named(fields).get("body")


def named(flat: Sequence[Any]) -> dict[str, Any]:
    """A flat list of names and values, as a dict."""
    return {as_str(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def as_str(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def dead_letter(fields: dict[str, Any]) -> DeadLetter:
    try:
        transaction = decode(fields["body"])
    except DecodeError:
        transaction = None
    category = as_str(fields["category"])
    return DeadLetter(
        transaction_id=transaction.id if transaction else as_str(fields["id"]) or None,
        transaction=transaction,
        reason=BurialReason(as_str(fields["reason"])),
        category=ExceptionCategory(category) if category else None,
        error=as_str(fields["error"]) or None,
        deliveries=int(fields["deliveries"]),
        enqueued_at=_moment(fields["enqueued_at"]),
        died_at=_moment(fields["died_at"]),
    )


def exhumed(key: str, fields: dict[str, Any]) -> Exhumed:
    letter = dead_letter(fields)
    return Exhumed(
        key=key,
        body=fields["body"],
        transaction_id=letter.transaction_id,
        reason=letter.reason,
        category=letter.category,
        error=letter.error,
        deliveries=letter.deliveries,
        enqueued_at=letter.enqueued_at.timestamp(),
        died_at=letter.died_at.timestamp(),
        history=mishaps(as_str(fields.get("history", b""))),
    )


def _moment(milliseconds: bytes) -> datetime:
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)
