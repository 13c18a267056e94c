"""A dead letter in the store: what happened to it, and how it becomes a transaction again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from onceward.connectors.codec import DecodeError, decode, sanitize_metadata
from onceward.connectors.lease_rules import Failure
from onceward.telemetry.redaction import redact
from onceward.transaction import Transaction

KEPT_SECONDS = 90 * 86400.0
"""A dead letter is kept at least this long after each of its deaths, whatever happens to it."""
ENVELOPE = ("event_type", "aggregate_id", "sequence", "schema_version", "traceparent", "tracestate")
"""Fields of a JSON message, next to its payload, that become metadata."""


class Category(StrEnum):
    """Who has to act: operators of a service, producer and consumer, the business, or a developer."""

    INFRASTRUCTURE = "infrastructure"
    """A network, a service, a database: it may succeed at another time."""
    CONTRACT = "contract"
    """Producer and consumer do not agree: the schema, the envelope, an id used twice."""
    BUSINESS = "business"
    """The consumer refused it, and people have to decide."""
    IN_DOUBT = "in_doubt"
    """Whether an outside effect has happened is unknown, and its key has expired: an operator asks the provider, and
    records the answer with `onceward inbox resolve`."""
    POISON = "poison"
    """It seems to kill its processes. It is redriven only when that is fixed."""


class Status(StrEnum):
    """The state of a letter."""

    OPEN = "open"
    REDRIVEN = "redriven"
    """Waiting to be delivered again, or in flight."""
    RESOLVED = "resolved"
    """Delivered again, and done."""
    DISCARDED = "discarded"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter in the store, as operators see it."""

    id: int
    consumer: str
    message_id: str
    origin: str
    event_type: str
    aggregate_id: str | None
    sequence: int | None
    category: Category
    reason: str
    error: str
    attempts: int
    """Total over all its deaths."""
    deaths: int
    history: tuple[Failure, ...]
    trace_id: str | None
    first_failed_at: datetime
    died_at: datetime
    keep_until: datetime
    hold: str | None
    """Why it must not be removed; None if it is not held."""
    status: Status
    rca_id: int | None
    redrive_id: str | None
    redrives: int
    available_at: datetime | None
    """When its redrive is due."""
    settled_at: datetime | None
    """When it was resolved or discarded."""
    size: int
    """Of the body, in bytes."""
    digest: str
    """SHA-256 of the body."""
    edited_at: datetime | None = None
    """When its payload was last corrected; None if it never was."""
    edited_by: str | None = None
    edit_cause: str | None = None
    order_key: str | None = None
    """The key that it holds while it is open or redriven, if its consumer keeps order."""
    waiting: int | None = None
    """Events that wait behind it, as its consumer last noted; None if it has noted nothing."""
    waiting_ids: tuple[str, ...] = ()
    """The first of them."""


def transaction_of(
    body: bytes, *, message_id: str, event_at: float | None, first_failed_at: float
) -> Transaction:
    """Read what was buried: a transaction, or JSON from a queue. Raises `DecodeError` for anything else.

    Id, payload and time are those that `Event.of` found in the message, so if it was done, redriving it is a duplicate.
    """
    try:
        return decode(body)
    except DecodeError as error:
        refusal = error
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise refusal from None
    metadata: dict[str, Any] = {}
    if isinstance(content, Mapping) and content.get("tracking_id") is not None and "payload" in content:
        metadata = sanitize_metadata(
            {name: content[name] for name in ENVELOPE if content.get(name) is not None}
        )
        content = content["payload"]
    # If the event's own time is unknown, use one that never changes: the inbox finds its record by it.
    created_at = moment(first_failed_at if event_at is None else event_at)
    return Transaction(id=message_id, payload=content, metadata=metadata, created_at=created_at)


def from_row(row: dict[str, Any]) -> DeadLetter:
    return DeadLetter(
        id=row["id"],
        consumer=row["consumer"],
        message_id=row["message_id"],
        origin=row["origin"],
        event_type=row["event_type"],
        aggregate_id=row["aggregate_id"],
        sequence=row["sequence"],
        category=Category(row["category"]),
        reason=row["reason"],
        error=redact(row["error"]),  # an older version may have stored values
        attempts=row["attempts"],
        deaths=row["deaths"],
        history=tuple(
            Failure(each.at, redact(each.error), each.attempt, each.category, each.where)
            for each in decode_history(row["history"])
        ),
        trace_id=row["trace_id"],
        first_failed_at=moment(row["first_failed_at"]),
        died_at=moment(row["died_at"]),
        keep_until=moment(row["keep_until"]),
        hold=row["hold"],
        status=Status(row["status"]),
        rca_id=row["rca_id"],
        redrive_id=row["redrive_id"],
        redrives=row["redrives"],
        available_at=None if row["available_at"] is None else moment(row["available_at"]),
        settled_at=None if row["settled_at"] is None else moment(row["settled_at"]),
        size=row["size"],
        digest=bytes(row["body_sha256"]).hex(),
        edited_at=None if row["edited_at"] is None else moment(row["edited_at"]),
        edited_by=row["edited_by"],
        edit_cause=row["edit_cause"],
        order_key=row["order_key"],
        waiting=row["waiting"],
        waiting_ids=() if row["waiting_ids"] is None else tuple(json.loads(row["waiting_ids"])),
    )


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


decode_history = msgspec.json.Decoder(tuple[Failure, ...]).decode
