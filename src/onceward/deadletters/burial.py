"""A burial: everything known about a message that failed permanently, from whatever it failed in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec
from opentelemetry import trace

from onceward._ids import same_id
from onceward._process.stacks import error_stack
from onceward._secrets import mask_shown
from onceward._text import storable
from onceward.connectors.codec import DecodeError, encode_with
from onceward.connectors.lease_rules import BurialReason, DeadMessage, Failure, breach_of
from onceward.deadletters.letter import Category
from onceward.errors import ConfigurationError
from onceward.inbox.errors import ContractError
from onceward.inbox.event import Event
from onceward.task.exceptions import ExceptionCategory, failure_category
from onceward.task.lifecycle import text_of
from onceward.telemetry.redaction import redact, redact_shown
from onceward.transaction import Transaction

LONGEST_ID = 400
LONGEST_NAME = 200
"""Characters of indexed values: longer ones might not fit into the index."""
NEVER_ENDED = "delivered, and never came to an end"
"""A line of stored histories, by which deaths are compared: do not change it."""
MOST_LOST_LINES = 100
"""In the history of a letter: a program that writes to a source can claim any number of deliveries."""
LARGEST_COUNT = 2**31 - 1
"""Of an INTEGER in PostgreSQL."""
POISON_AFTER = 3
"""A message is poison if this many of its deliveries were never settled, or all of them."""
UNREADABLE = (DecodeError, UnicodeDecodeError, json.JSONDecodeError, msgspec.DecodeError)


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
    order_key: str | None = None
    """The key that it holds, if its consumer keeps order."""
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
        message_id = same_id(storable(self.message_id))
        if len(message_id) > LONGEST_ID:
            message_id = f"{message_id[:LONGEST_NAME]}…{hashlib.sha256(message_id.encode()).hexdigest()}"
        settle(self, "message_id", message_id)
        settle(self, "category", Category(self.category))
        settle(self, "event_type", storable(self.event_type)[:LONGEST_NAME])
        for field in ("consumer", "origin"):  # letters are found by them
            settle(self, field, storable(mask_shown(getattr(self, field))))
        for field in ("reason", "error"):
            settle(self, field, storable(redact(getattr(self, field))))
        for field in ("aggregate_id", "trace_id"):
            if getattr(self, field) is not None:
                settle(self, field, storable(getattr(self, field))[:LONGEST_ID])
        history: tuple[Failure, ...] = ()
        for each in self.history:
            where = None if each.where is None else storable(each.where)
            history += (
                Failure(each.at, storable(redact_shown(each.error)), each.attempt, each.category, where),
            )
        settle(self, "history", history)


def burial_of(
    thing: Any,
    *,
    consumer: str,
    error: BaseException | str,
    origin: str | None = None,
    category: Category | str | None = None,
    attempts: int | None = None,
    history: tuple[Failure, ...] = (),
) -> Burial:
    """Build what `DeadLetters.bury` takes, for something that failed permanently in your own loop.

    `thing` is a `QueueMessage`, a `Transaction`, an `Event` or a mapping. A message is stored as the bytes that
    arrived. The category follows from the error: a `ContractError` is contract (or poison), a BUSINESS failure is
    business, unreadable bytes are contract, anything else is infrastructure.
    """
    text = redact(error) if isinstance(error, str) else text_of(error)
    category = Category(category) if category is not None else _category_of_error(error)
    number = attempts or getattr(thing, "deliveries", None) or max(len(history), 1)
    event, fields = _event_of(thing)
    message_id, body = _identify(thing, event)
    now = datetime.now(UTC).isoformat()
    where = None if isinstance(error, str) else error_stack(error)
    history = history or (Failure(now, text, number, str(category), where),)
    return Burial(
        consumer=consumer,
        message_id=message_id,
        origin=origin or _origin(thing),
        body=body,
        category=category,
        reason="failed",
        error=text,
        attempts=number,
        history=history,
        trace_id=_trace_id(thing) or _current_trace_id(),
        first_failed_at=datetime.fromisoformat(history[0].at).timestamp(),
        **fields,
    )


def burial_of_dead(dead: DeadMessage, *, consumer: str, origin: str) -> Burial:
    """Build the burial of a source's dead letter. The same letter always gives the same burial."""
    key = "-".join(map(str, dead.key)) if isinstance(dead.key, tuple) else str(dead.key)
    category, history = _diagnose(dead)
    return Burial(
        consumer=consumer,
        message_id=dead.transaction_id or f"{origin}:{key}",
        origin=origin,
        body=dead.body,
        category=category,
        reason=str(dead.reason),
        error=dead.error or history[-1].error,
        attempts=min(max(dead.deliveries, len(dead.history)), LARGEST_COUNT),
        history=history,
        trace_id=None if dead.transaction is None else _trace_id(dead.transaction),
        first_failed_at=datetime.fromisoformat(history[0].at).timestamp(),
        **({} if dead.transaction is None else _event_of(dead.transaction)[1]),
    )


def _category_of_error(error: BaseException | str) -> Category:
    if isinstance(error, UNREADABLE) or hasattr(error, "entries"):  # the queue's UndecodableEntryError
        return Category.CONTRACT
    return category_of_error(error)


def _diagnose(dead: DeadMessage) -> tuple[Category, tuple[Failure, ...]]:
    """Return its category, and its history with a line for each delivery that was never settled."""
    died_at = dead.died_at.isoformat()
    if dead.reason in (BurialReason.UNDECODABLE, BurialReason.TRIMMED):
        undecodable = dead.reason is BurialReason.UNDECODABLE
        category = Category.CONTRACT if undecodable else Category.INFRASTRUCTURE
        lost = 0
    else:
        # Letters older than histories have at most a category.
        ended = max(len(dead.history), int(dead.category is not None))
        lost = max(dead.deliveries - ended, 0)
        # If the last delivery came to an end, a failure killed the message, and not the message its process.
        failed_last = bool(dead.history) and dead.history[-1].attempt == dead.deliveries
        is_poison = lost and not failed_last and (lost >= POISON_AFTER or lost == dead.deliveries)
        category = Category.POISON if is_poison else category_of(dead.category, dead.kind)
    history = dead.history
    if lost:
        numbers = {each.attempt for each in history}
        missing = (number for number in range(1, dead.deliveries + 1) if number not in numbers)
        # When they began is unknown.
        shown = islice(missing, min(lost, MOST_LOST_LINES))
        lines = [*history, *(Failure(died_at, NEVER_ENDED, number) for number in shown)]
        history = tuple(sorted(lines, key=lambda each: each.attempt or 0))
    return category, history or (Failure(died_at, dead.error or str(dead.reason), None, str(category)),)


def _event_of(thing: Any) -> tuple[Event | None, dict[str, Any]]:
    """Return it as an event, if it is one, and the fields that a burial has of it."""
    try:
        event = Event.of(thing)
    except (ContractError, TypeError):
        return None, {}
    return event, {
        "event_type": event.event_type,
        "aggregate_id": event.aggregate_id,
        "sequence": event.sequence,
        "event_at": event.created_at.timestamp(),
    }


def _identify(thing: Any, event: Event | None) -> tuple[str, bytes]:
    """Return its id and its bytes."""
    if isinstance(thing, Transaction):
        return thing.id, encode_with({}, thing)
    if hasattr(thing, "stream") and hasattr(thing, "payload"):
        raw = getattr(thing, "raw", None)
        body = raw if isinstance(raw, bytes) else _encode(thing.payload)
        return (f"{thing.stream}:{thing.id}" if event is None else event.tracking_id), body
    if isinstance(thing, Event):
        return thing.tracking_id, encode_with({}, _as_transaction(thing))
    if isinstance(thing, Mapping) and event is not None:
        return event.tracking_id, _encode(thing)
    raise TypeError(
        "bury a QueueMessage, a Transaction, an Event, or a mapping with a tracking_id and its own time, not "
        f"{type(thing).__name__}; for anything else build a Burial(…)"
    )


def _encode(content: Any) -> bytes:
    if isinstance(content, Mapping) and any(isinstance(key, bytes) for key in content):
        return msgspec.msgpack.encode(content)  # an entry without our fields was never JSON
    return msgspec.json.encode(content)


def _as_transaction(event: Event) -> Transaction:
    fields = ("event_type", "aggregate_id", "sequence", "schema_version")
    metadata = {name: getattr(event, name) for name in fields if getattr(event, name) is not None}
    return Transaction(
        id=event.tracking_id, payload=event.payload, metadata=metadata, created_at=event.created_at
    )


def _origin(thing: Any) -> str:
    stream = getattr(thing, "stream", None)
    return type(thing).__name__.lower() if stream is None else f"redis stream {stream}"


def _trace_id(thing: Any) -> str | None:
    carrier = getattr(thing, "metadata", None) or getattr(thing, "payload", thing)
    traceparent = carrier.get("traceparent") if isinstance(carrier, Mapping) else None
    parts = traceparent.split("-") if isinstance(traceparent, str) else []
    return parts[1] if len(parts) >= 4 else None


def _current_trace_id() -> str | None:
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def category_of(category: ExceptionCategory | str | None, kind: str | None) -> Category:
    """Derive the category from the engine's category of a failure, and the kind of contract breach."""
    if kind in (Category.POISON, Category.IN_DOUBT):
        return Category(kind)
    if kind is not None:
        return Category.CONTRACT
    if category == ExceptionCategory.BUSINESS:
        return Category.BUSINESS
    return Category.INFRASTRUCTURE


def category_of_error(error: BaseException | str | None) -> Category:
    """Derive the category from a failure."""
    return category_of(failure_category(error), breach_of(error))
