"""The rows of dead letters that are stored: once per death, and only for events that are neither done nor in flight."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from onceward.connectors.lease_rules import Failure
from onceward.db.transaction import DbTransaction
from onceward.deadletters import alerts, root_causes
from onceward.deadletters.burial import Burial
from onceward.deadletters.dedup_records import BuriedEvent, Standing, category_for, event_in, standing
from onceward.deadletters.groups import group_of
from onceward.deadletters.letter import KEPT_SECONDS, decode_history
from onceward.inbox.stores.base import Store
from onceward.storage.database import Sql
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.deadletters"))


class Buried(NamedTuple):
    """What became of burials."""

    fresh: list[alerts.Buried]
    """The new ones and, once per kind, how many letters are like them: all of a kind have the same numbers."""
    in_flight: list[Burial]
    done: list[Burial]
    """Those whose events are done."""


def bury(
    transaction: DbTransaction,
    rows: Sql,
    store: Store,
    burials: Sequence[Burial],
    *,
    all_or_none: bool = False,
) -> Buried:
    """Store these, except those whose events are done or in flight; with `all_or_none`, none if one is in flight."""
    buried = Buried([], [], [])
    fresh: list[Burial] = []
    seen: set[tuple[str, str, str | None]] = set()
    events = [_event_in(burial) for burial in burials]
    standings: dict[int, Standing] = {}
    # Every process locks in the same order and stops at the first that is taken. Otherwise two of them could take
    # turns at keeping each other from burying the same letters.
    for index in sorted(range(len(events)), key=lambda index: _lock_order(events[index])):
        standings[index] = standing(transaction, store, events[index])
        if all_or_none and standings[index] is Standing.IN_FLIGHT:
            return Buried([], [burials[index]], [])
    for index, (burial, event) in enumerate(zip(burials, events, strict=True)):
        found = standings[index]
        if found is Standing.IN_FLIGHT:
            buried.in_flight.append(burial)
        elif found is Standing.DONE:
            buried.done.append(burial)
            _log.info(
                "message %s of %s is done: it failed only afterwards, or another copy of it did; it is no dead letter",
                burial.message_id,
                burial.consumer,
            )
        elif _bury(transaction, rows, _categorized(transaction, store, burial, event), event):
            fresh.append(burial)
    for burial in fresh:
        kind = (burial.consumer, burial.event_type, burial.aggregate_id)
        counts = None
        if kind not in seen:
            counts = rows.run(
                transaction,
                _COUNTS,
                consumer=burial.consumer,
                event_type=burial.event_type,
                aggregate=burial.aggregate_id,
                recent=alerts.SURGE_SECONDS,
                baseline=alerts.BASELINE_SECONDS,
            )
        buried.fresh.append((burial, None if counts is None else counts.mappings().one()))
        seen.add(kind)
    return buried


def _event_in(burial: Burial) -> BuriedEvent | None:
    return event_in(
        burial.consumer,
        burial.body,
        message_id=burial.message_id,
        event_at=burial.event_at,
        first_failed_at=burial.first_failed_at or 0.0,
    )


def _lock_order(event: BuriedEvent | None) -> tuple[str, str]:
    return ("", "") if event is None else (event.key.consumer_id, event.key.tracking_id)


def _categorized(
    transaction: DbTransaction, store: Store, burial: Burial, event: BuriedEvent | None
) -> Burial:
    category = category_for(transaction, store, event, burial.category)
    return burial if category is burial.category else msgspec.structs.replace(burial, category=category)


def _bury(transaction: DbTransaction, rows: Sql, burial: Burial, event: BuriedEvent | None) -> bool:
    """Store it. Return False, and change nothing, if this death was reported before.

    The lines of its history identify a death. A process that is killed between burying a message and acknowledging
    it reports it again, perhaps after the letter was redriven and resolved: that must not reopen it.
    """
    history = burial.history
    if not history:
        history = (Failure(rows.timestamp(transaction), burial.error, burial.attempts),)
    values = {
        "category": str(burial.category),
        "reason": burial.reason,
        "error": burial.error,
        "group": group_of(burial.error),
        "order_key": burial.order_key,
        "kept": KEPT_SECONDS,
    }
    identity = {
        "consumer": burial.consumer,
        "message_id": burial.message_id,
        "digest": hashlib.sha256(burial.body).digest(),
    }
    new = {
        **values,
        **identity,
        "origin": burial.origin,
        "event_type": burial.event_type,
        "aggregate_id": burial.aggregate_id,
        "sequence": burial.sequence,
        "event_at": burial.event_at,
        "attempts": burial.attempts,
        "history": msgspec.json.encode(history).decode(),
        "body": burial.body,
        "trace_id": burial.trace_id,
        "first": burial.first_failed_at,
        "tracking_id": None if event is None else event.key.tracking_id,
        "payload_digest": None if event is None else event.digest.content,
    }
    before = None
    while before is None:  # a purge may remove it between the two
        if rows.run(transaction, _BURY, **new).rowcount == 1:
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
        history=msgspec.json.encode((*known, *fresh)).decode(),
        attempts=burial.attempts if len(fresh) == len(history) else len(fresh),
        **values,
    )
    if is_settled:
        root_causes.reopen(transaction, rows, before["id"])
    return True


_BURY = """
    INSERT INTO onceward_dead_letters (
        consumer, message_id, origin, event_type, aggregate_id, sequence, event_at, category, reason, error, attempts,
        history, body, body_sha256, trace_id, first_failed_at, died_at, keep_until, tracking_id, payload_sha256,
        error_group, order_key)
    VALUES (
        :consumer, :message_id, :origin, :event_type, :aggregate_id, :sequence, :event_at, :category, :reason, :error,
        :attempts, :history, :body, :digest, :trace_id, coalesce(CAST(:first AS double precision), {now}),
        {now}, {now} + :kept, :tracking_id, :payload_digest, :group, :order_key)
    ON CONFLICT (consumer, message_id, body_sha256) DO NOTHING
"""
_FIND = """
    SELECT id, status, history FROM onceward_dead_letters
    WHERE consumer = :consumer AND message_id = :message_id AND body_sha256 = :digest
"""
# A letter that waits for its redrive, or is being redriven, stays in it: the copy that died was another one.
_BURY_AGAIN = """
    UPDATE onceward_dead_letters SET
        status = :status, category = :category, reason = :reason, error = :error, error_group = :group,
        order_key = coalesce(:order_key, order_key), attempts = attempts + :attempts,
        deaths = deaths + 1, history = :history, died_at = {now}, keep_until = {now} + :kept, settled_at = NULL
    WHERE id = :id
"""
_COUNTS = """
    SELECT
        {now} AS at,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE status = 'open' AND consumer = :consumer AND event_type = :event_type) AS of_type,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE consumer = :consumer AND died_at > {now} - :recent) AS recent,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE consumer = :consumer AND died_at <= {now} - :recent AND died_at > {now} - :baseline) AS before,
        (SELECT count(*) FROM onceward_dead_letters WHERE status = 'open' AND consumer = :consumer
            AND aggregate_id = :aggregate) AS of_aggregate
"""
