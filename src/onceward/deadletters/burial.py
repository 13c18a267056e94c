"""Burying: what is told twice is kept once, and what dies again dies in the same letter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from opentelemetry import trace

from onceward.connectors.codec import DecodeError, decode, encode_with
from onceward.connectors.lease_rules import BurialReason, Exhumed
from onceward.db.transaction import DbTransaction
from onceward.deadletters import root_causes
from onceward.deadletters.letter import (
    KEPT_DAYS,
    Burial,
    Category,
    Failure,
    as_text,
    category_of,
    history_of,
    moment,
)
from onceward.inbox.errors import ContractError
from onceward.inbox.event import Event
from onceward.storage.sql import Sql
from onceward.task.lifecycle import text_of
from onceward.transaction import Transaction

KEPT_SECONDS = KEPT_DAYS * 86400.0


def bury(transaction: DbTransaction, rows: Sql, burial: Burial) -> bool:
    """Keep it. False: this death was told before, and nothing was changed.

    A death is known by the lines of its history. Whoever is killed between burying something and acknowledging it
    tells it again, perhaps after the letter has been redriven and is done: that must not open it again.
    """
    now = rows.now(transaction)
    history = burial.history or (Failure(moment(now).isoformat(), burial.error, burial.attempts),)
    digest = burial.digest
    values = {
        "category": str(burial.category),
        "reason": burial.reason,
        "error": burial.error,
        "keep_until": now + KEPT_SECONDS,
    }
    identity = {"consumer": burial.consumer, "message_id": burial.message_id, "digest": digest}
    new = {
        **values,
        **identity,
        "origin": burial.origin,
        "event_type": burial.event_type,
        "aggregate_id": burial.aggregate_id,
        "sequence": burial.sequence,
        "event_at": burial.event_at,
        "attempts": burial.attempts,
        "history": as_text(history),
        "body": burial.body,
        "trace_id": burial.trace_id,
        "first": now if burial.first_failed_at is None else burial.first_failed_at,
    }
    before = None
    while before is None:  # between the two a purge may take it away
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
        return False  # nothing tells it from the death that is known
    known = history_of(before["history"])
    # As they were kept: what cannot be stored was escaped.
    told = history_of(as_text(history))
    fresh = tuple(each for each in told if each not in known)
    if not fresh:
        return False
    rows.run(
        transaction,
        _BURY_AGAIN,
        id=before["id"],
        status="open" if is_settled else before["status"],
        history=as_text((*known, *fresh)),
        attempts=burial.attempts if len(fresh) == len(told) else len(fresh),
        **values,
    )
    if is_settled:
        root_causes.reopen(transaction, rows, before["id"])
    return True


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
# One that waits for its redrive, or is being redriven, goes on with it: the copy that died was another.
_BURY_AGAIN = """
    UPDATE onceward_dead_letters SET
        status = :status, category = :category, reason = :reason, error = :error, attempts = attempts + :attempts,
        deaths = deaths + 1, history = :history, died_at = {now}, keep_until = :keep_until, settled_at = NULL
    WHERE id = :id
"""


# From whatever failed to what is buried, with its original bytes and the right category.


NEVER_ENDED = "delivered, and never came to an end"
POISON_AFTER = 3
"""Deliveries that never came to an end make something poison; so do fewer, if there were no others."""
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
    """What to give to `DeadLetters.bury` for something that failed for good in a loop of your own.

    `thing` is a `QueueMessage`, a `Transaction`, an `Event` or a mapping. A message is kept as the bytes that came. The
    category follows from the error: a `ContractError` is contract (or poison), a BUSINESS failure is business, what
    cannot be read is contract, anything else is infrastructure.
    """
    told = error if isinstance(error, str) else text_of(error)
    settled = Category(category) if category is not None else _category_of_error(error)
    number = attempts or getattr(thing, "deliveries", None) or max(len(history), 1)
    event = _event_of(thing)
    message_id, body = _identity(thing, event)
    now = datetime.now(UTC)
    last = Failure(now.isoformat(), told, number, str(settled))
    return Burial(
        consumer=consumer,
        message_id=message_id,
        origin=origin or _origin(thing),
        body=body,
        category=settled,
        reason="failed",
        error=told,
        attempts=number,
        history=history or (last,),
        trace_id=_trace_id(thing) or _current_trace_id(),
        first_failed_at=_seconds(history[0].at) if history else now.timestamp(),
        **_of_event(event),
    )


def burial_of_exhumed(dead: Exhumed, *, consumer: str, origin: str) -> Burial:
    """A dead letter of a connector's own. The same for the same letter, however often it is asked."""
    transaction = _decoded(dead.body)
    key = "-".join(map(str, dead.key)) if isinstance(dead.key, tuple) else str(dead.key)
    category = _category_of_exhumed(dead)
    history = _history(dead, category)
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
        trace_id=None if transaction is None else _trace_id(transaction),
        first_failed_at=_seconds(history[0].at),
        **_of_event(None if transaction is None else _event_of(transaction)),
    )


# ───────────────────────────── categories ─────────────────────────────


def _category_of_error(error: BaseException | str) -> Category:
    if isinstance(error, UNREADABLE) or hasattr(error, "entries"):  # the queue's UndecodableEntryError
        return Category.CONTRACT
    kind = getattr(error, "kind", None)
    return category_of(getattr(error, "category", None), None if kind is None else str(kind))


def _category_of_exhumed(dead: Exhumed) -> Category:
    if dead.reason is BurialReason.UNDECODABLE:
        return Category.CONTRACT
    if dead.reason is BurialReason.TRIMMED:
        return Category.INFRASTRUCTURE
    lost = _lost(dead)
    if lost and (lost >= POISON_AFTER or lost == dead.deliveries):
        return Category.POISON
    return category_of(dead.category, dead.history[-1].kind if dead.history else None)


def _lost(dead: Exhumed) -> int:
    """Deliveries that never came to an end."""
    if dead.reason in (BurialReason.UNDECODABLE, BurialReason.TRIMMED):
        return 0
    # A letter from before histories were kept has a category at most.
    ended = max(len(dead.history), int(dead.category is not None))
    return max(dead.deliveries - ended, 0)


def _history(dead: Exhumed, category: Category) -> tuple[Failure, ...]:
    told = [Failure(each.at, each.error, each.delivery, each.category) for each in dead.history]
    died_at = datetime.fromtimestamp(dead.died_at, UTC).isoformat()
    ended = {each.delivery for each in dead.history}
    missing = [number for number in range(1, dead.deliveries + 1) if number not in ended]
    # When they began is not known, only that they never ended.
    told += [Failure(died_at, NEVER_ENDED, number) for number in missing[: _lost(dead)]]
    told.sort(key=lambda each: each.attempt or 0)
    return tuple(told) or (Failure(died_at, dead.error or str(dead.reason), None, str(category)),)


# ───────────────────────────── what it was ─────────────────────────────


def _event_of(thing: Any) -> Event | None:
    try:
        return Event.of(thing)
    except (ContractError, TypeError):
        return None


def _of_event(event: Event | None) -> dict[str, Any]:
    if event is None:
        return {}
    return {
        "event_type": event.event_type,
        "aggregate_id": event.aggregate_id,
        "sequence": event.sequence,
        "event_at": event.created_at.timestamp(),
    }


def _identity(thing: Any, event: Event | None) -> tuple[str, bytes]:
    """Its id, and its bytes."""
    if isinstance(thing, Transaction):
        return thing.id, encode_with({}, thing)
    if hasattr(thing, "stream") and hasattr(thing, "payload"):
        raw = getattr(thing, "raw", None)
        body = raw if isinstance(raw, bytes) else _encoded(thing.payload)
        return (f"{thing.stream}:{thing.id}" if event is None else event.tracking_id), body
    if isinstance(thing, Event):
        return thing.tracking_id, encode_with({}, _as_transaction(thing))
    if isinstance(thing, Mapping) and event is not None:
        return event.tracking_id, _encoded(thing)
    raise TypeError(
        "what is buried is a QueueMessage, a Transaction, an Event or a mapping with a tracking_id and a time of its "
        f"own, not {type(thing).__name__}; make a Burial(…) of anything else"
    )


def _encoded(content: Any) -> bytes:
    if isinstance(content, Mapping) and any(isinstance(key, bytes) for key in content):
        return msgspec.msgpack.encode(
            content
        )  # a stranger's entry, with none of our fields: no JSON, and none made of it
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


def _decoded(body: bytes) -> Transaction | None:
    try:
        return decode(body)
    except DecodeError:
        return None


def _trace_id(thing: Any) -> str | None:
    carrier = getattr(thing, "metadata", None) or getattr(thing, "payload", thing)
    traceparent = carrier.get("traceparent") if isinstance(carrier, Mapping) else None
    parts = traceparent.split("-") if isinstance(traceparent, str) else []
    return parts[1] if len(parts) >= 4 else None


def _current_trace_id() -> str | None:
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def _seconds(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()
