"""A dead letter: what was buried, why, what happened to it since, and how it becomes a transaction again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from onceward.connectors.codec import DecodeError, decode, sanitize_metadata
from onceward.connectors.dead_message import Failure, breach_of
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory, failure_category
from onceward.transaction import Transaction

__all__ = ["Burial", "Category", "DeadLetter", "Failure", "Status"]

KEPT_DAYS = 90
"""A dead letter is kept at least this long after each of its deaths, whatever happens to it."""
LONGEST_ID = 400
LONGEST_NAME = 200
"""Characters of indexed values: longer ones might not fit into the index."""
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
    POISON = "poison"
    """It seems to kill its processes. It is never redriven."""


class Status(StrEnum):
    """The state of a letter."""

    OPEN = "open"
    REDRIVEN = "redriven"
    """Waiting to be delivered again, or in flight."""
    RESOLVED = "resolved"
    """Delivered again, and done."""
    DISCARDED = "discarded"


class Burial(msgspec.Struct, frozen=True, kw_only=True):
    """What is given to the store: everything known about a message when it is buried."""

    consumer: str
    """Its consumer: the contract's consumer_id, or the name of the task or group."""
    message_id: str
    """Identifies it, together with `consumer` and the body, so burying it twice is harmless."""
    origin: str
    """Where it came from, for people: "sqlite queue orders.db", "redis stream orders"."""
    body: bytes
    """The delivered bytes."""
    category: Category
    reason: str
    error: str = ""
    attempts: int = 1
    history: tuple[Failure, ...] = ()
    """The store compares its lines to tell a new death from one that is reported twice."""
    event_type: str = ""
    aggregate_id: str | None = None
    sequence: int | None = None
    event_at: float | None = None
    """The event's own time, in seconds since 1970, if the body does not have it."""
    trace_id: str | None = None
    first_failed_at: float | None = None
    """Seconds since 1970; None is now."""

    def __post_init__(self) -> None:
        if not isinstance(self.body, bytes):
            raise ConfigurationError(
                f"the body of a dead letter must be bytes, not {type(self.body).__name__}"
            )
        if not 0 < len(self.consumer) <= LONGEST_NAME:
            raise ConfigurationError(
                f"dead letters are stored by consumer: its name must have 1 to {LONGEST_NAME} characters"
            )
        # Values from outside may be too long, or hold characters that no database accepts. They are still buried.
        settle = msgspec.structs.force_setattr
        message_id = storable(self.message_id)
        if len(message_id) > LONGEST_ID:
            message_id = f"{message_id[:LONGEST_NAME]}…{hashlib.sha256(message_id.encode()).hexdigest()}"
        settle(self, "message_id", message_id)
        settle(self, "category", Category(self.category))
        settle(self, "event_type", storable(self.event_type)[:LONGEST_NAME])
        for field in ("consumer", "origin", "reason", "error"):
            settle(self, field, storable(getattr(self, field)))
        for field in ("aggregate_id", "trace_id"):
            if getattr(self, field) is not None:
                settle(self, field, storable(getattr(self, field))[:LONGEST_ID])
        history = [
            Failure(each.at, storable(each.error), each.attempt, each.category) for each in self.history
        ]
        settle(self, "history", tuple(history))

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.body).digest()


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


def category_of(category: ExceptionCategory | str | None, kind: str | None) -> Category:
    """Derive the category from the engine's category of a failure, and the kind of contract breach."""
    if kind == "poison":
        return Category.POISON
    if kind is not None:
        return Category.CONTRACT
    if category == ExceptionCategory.BUSINESS:
        return Category.BUSINESS
    return Category.INFRASTRUCTURE


def category_of_error(error: BaseException | str | None) -> Category:
    """Derive the category from a failure."""
    return category_of(failure_category(error), breach_of(error))


def storable(text: str) -> str:
    """Escape lone surrogates and zero bytes, which some databases refuse."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


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
        error=row["error"],
        attempts=row["attempts"],
        deaths=row["deaths"],
        history=decode_history(row["history"]),
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
    )


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


decode_history = msgspec.json.Decoder(tuple[Failure, ...]).decode


def encode_history(history: tuple[Failure, ...]) -> str:
    return msgspec.json.encode(history).decode()
