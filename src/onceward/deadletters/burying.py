"""Burying: what is told twice is kept once, and what dies again dies in the same letter."""

from __future__ import annotations

from typing import Any

from onceward.db.transaction import DbTransaction
from onceward.deadletters import rcas
from onceward.deadletters.letter import KEPT_DAYS, Burial, Failure, as_text, history_of, moment
from onceward.storage.sql import Sql

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
        rcas.reopen(transaction, rows, before["id"])
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
