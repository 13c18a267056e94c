"""Burying: from a failed message to its row in the store, where a death that is reported twice counts once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from opentelemetry import trace

from onceward.connectors.codec import DecodeError, encode_with
from onceward.connectors.dead_message import BurialReason, DeadMessage
from onceward.db.transaction import DbTransaction
from onceward.deadletters import root_causes
from onceward.deadletters.letter import (
    KEPT_DAYS,
    Burial,
    Category,
    Failure,
    category_of,
    category_of_error,
    decode_history,
    encode_history,
    moment,
)
from onceward.inbox.errors import ContractError
from onceward.inbox.event import Event
from onceward.storage.database import Sql
from onceward.task.lifecycle import text_of
from onceward.transaction import Transaction

KEPT_SECONDS = KEPT_DAYS * 86400.0
NEVER_ENDED = "delivered, and never came to an end"
"""A line of stored histories, by which deaths are compared: do not change it."""
POISON_AFTER = 3
"""A message is poison if this many of its deliveries were never settled, or all of them."""
UNREADABLE = (DecodeError, UnicodeDecodeError, json.JSONDecodeError, msgspec.DecodeError)


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
    text = error if isinstance(error, str) else text_of(error)
    category = Category(category) if category is not None else _category_of_error(error)
    number = attempts or getattr(thing, "deliveries", None) or max(len(history), 1)
    event = _event_of(thing)
    message_id, body = _identify(thing, event)
    now = datetime.now(UTC).isoformat()
    history = history or (Failure(now, text, number, str(category)),)
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
        **_event_fields(event),
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
        attempts=max(dead.deliveries, len(dead.history)),
        history=history,
        trace_id=None if dead.transaction is None else _trace_id(dead.transaction),
        first_failed_at=datetime.fromisoformat(history[0].at).timestamp(),
        **_event_fields(None if dead.transaction is None else _event_of(dead.transaction)),
    )


def bury(transaction: DbTransaction, rows: Sql, burial: Burial) -> bool:
    """Store it. Return False, and change nothing, if this death was reported before.

    The lines of its history identify a death. A process that is killed between burying a message and acknowledging
    it reports it again, perhaps after the letter was redriven and resolved: that must not reopen it.
    """
    now = rows.now(transaction)
    history = burial.history or (Failure(moment(now).isoformat(), burial.error, burial.attempts),)
    values = {
        "category": str(burial.category),
        "reason": burial.reason,
        "error": burial.error,
        "keep_until": now + KEPT_SECONDS,
    }
    identity = {"consumer": burial.consumer, "message_id": burial.message_id, "digest": burial.digest}
    new = {
        **values,
        **identity,
        "origin": burial.origin,
        "event_type": burial.event_type,
        "aggregate_id": burial.aggregate_id,
        "sequence": burial.sequence,
        "event_at": burial.event_at,
        "attempts": burial.attempts,
        "history": encode_history(history),
        "body": burial.body,
        "trace_id": burial.trace_id,
        "first": now if burial.first_failed_at is None else burial.first_failed_at,
    }
    before = None
    while before is None:  # a purge may remove it between the two
        if rows.changed(transaction, _BURY, **new) == 1:
            return True
        before = rows.first(transaction, _FIND + rows.for_update, **identity)
    return _bury_again(transaction, rows, burial, before, history, values)


def _bury_again(
    transaction: DbTransaction,
    rows: Sql,
    burial: Burial,
    before: dict[str, Any],
    history: tuple[Failure, ...],
    values: dict[str, Any],
) -> bool:
    is_settled = before["status"] in ("resolved", "discarded")
    if not burial.history and not is_settled:
        return False  # nothing distinguishes it from the known death
    known = decode_history(before["history"])
    fresh = tuple(each for each in history if each not in known)
    if not fresh:
        return False
    rows.run(
        transaction,
        _BURY_AGAIN,
        id=before["id"],
        status="open" if is_settled else before["status"],
        history=encode_history((*known, *fresh)),
        attempts=burial.attempts if len(fresh) == len(history) else len(fresh),
        **values,
    )
    if is_settled:
        root_causes.reopen(transaction, rows, before["id"])
    return True


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
        is_poison = lost and (lost >= POISON_AFTER or lost == dead.deliveries)
        category = Category.POISON if is_poison else category_of(dead.category, dead.kind)
    history = dead.history
    if lost:
        numbers = {each.attempt for each in history}
        missing = [number for number in range(1, dead.deliveries + 1) if number not in numbers]
        # When they began is unknown.
        lines = [*history, *(Failure(died_at, NEVER_ENDED, number) for number in missing[:lost])]
        history = tuple(sorted(lines, key=lambda each: each.attempt or 0))
    return category, history or (Failure(died_at, dead.error or str(dead.reason), None, str(category)),)


def _event_of(thing: Any) -> Event | None:
    try:
        return Event.of(thing)
    except (ContractError, TypeError):
        return None


def _event_fields(event: Event | None) -> dict[str, Any]:
    if event is None:
        return {}
    return {
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


_BURY = """
    INSERT INTO onceward_dead_letters (
        consumer, message_id, origin, event_type, aggregate_id, sequence, event_at, category, reason, error, attempts,
        history, body, body_sha256, trace_id, first_failed_at, died_at, keep_until)
    VALUES (
        :consumer, :message_id, :origin, :event_type, :aggregate_id, :sequence, :event_at, :category, :reason, :error,
        :attempts, :history, :body, :digest, :trace_id, :first, {now}, :keep_until)
    ON CONFLICT (consumer, message_id, body_sha256) DO NOTHING
"""
_FIND = """
    SELECT id, status, history FROM onceward_dead_letters
    WHERE consumer = :consumer AND message_id = :message_id AND body_sha256 = :digest
"""
# A letter that waits for its redrive, or is being redriven, stays in it: the copy that died was another one.
_BURY_AGAIN = """
    UPDATE onceward_dead_letters SET
        status = :status, category = :category, reason = :reason, error = :error, attempts = attempts + :attempts,
        deaths = deaths + 1, history = :history, died_at = {now}, keep_until = :keep_until, settled_at = NULL
    WHERE id = :id
"""
