"""Redriving letters: only those a filter selects, only with a root cause and a fix, and never faster than allowed.

Letters get staggered due times, after those scheduled before, so the pace survives restarts and two redrives do not
add up. Delivery enforces the rate, too: overdue letters do not come in one burst.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from typing import Any

import msgspec

from onceward._text import storable
from onceward.connectors.codec import DecodeError
from onceward.db.transaction import DbTransaction
from onceward.deadletters import root_causes
from onceward.deadletters.letter import Category, Status, transaction_of
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive_leases import pace_lock
from onceward.deadletters.root_causes import Rca, RedriveRefusedError
from onceward.inbox.errors import ContractError
from onceward.inbox.event import Event
from onceward.storage import audit
from onceward.storage.database import Sql, wait_for_lock

RATE = 100
"""Default letters per minute."""
HIGHEST_RATE = 1000
ONLY_FIXED = "once that is fixed, redrive it with --poison-fixed (poison_fixed=True)"
MOST = 10_000
"""Letters in one redrive, at most."""


class Redrive(msgspec.Struct, frozen=True, kw_only=True):
    """What a redrive scheduled."""

    id: str
    rca_id: int
    letters: int
    left: int = 0
    """More matching open letters, which need another redrive: one takes 10,000 at most."""
    first_at: float | None = None
    last_at: float | None = None
    """When the first and the last of them are due, in seconds since 1970."""
    repeated: bool = False
    """A redrive with this id already existed; this call did nothing."""


def redrive(
    transaction: DbTransaction,
    rows: Sql,
    wanted: Filter,
    rca: Rca | int,
    rate: int,
    operator: str,
    redrive_id: str | None,
    poison_fixed: bool = False,
) -> Redrive:
    """Schedule the open letters that the filter selects."""
    check(wanted, rca, rate, poison_fixed)
    operator = audit.check_operator(operator)
    assert wanted.consumer is not None
    wait_for_lock(transaction, pace_lock(wanted.consumer))
    root_causes.lock(transaction, rows)
    made = _find_earlier(transaction, rows, wanted, redrive_id)
    if made is not None:
        return made
    condition, values = msgspec.structs.replace(wanted, status=Status.OPEN).as_sql()
    if not poison_fixed:
        condition += " AND category <> 'poison'"
    chosen = _CHOSEN.replace("{condition}", condition) + rows.for_update
    letters = rows.all(transaction, chosen, most=MOST, **values)
    ids = [row["id"] for row in letters]
    if not ids:
        raise RedriveRefusedError(explain_no_match(transaction, rows, wanted))
    remaining = _REMAINING.replace("{condition}", condition)
    left = int(rows.run(transaction, remaining, **values).scalar_one()) - len(ids)
    rca_id = root_causes.use(transaction, rows, rca, operator)
    redrive_id = redrive_id or uuid.uuid4().hex
    times = _times(transaction, rows, wanted.consumer, rate, len(ids))
    common = {"rca": rca_id, "redrive": redrive_id, "rate": rate}
    scheduled = [{"id": id_, "at": at, **common} for id_, at in zip(ids, times, strict=True)]
    rows.many(transaction, _SCHEDULE, scheduled)
    poison = [row for row in letters if row["category"] == Category.POISON]
    for row in poison:
        rows.many(
            transaction, _FORGIVE, [{"consumer": wanted.consumer, "id": id_} for id_ in _event_ids(row)]
        )
    rows.run(
        transaction,
        _NOTE,
        consumer=wanted.consumer,
        filter=_as_text(wanted),
        letters=len(ids),
        operator=operator,
        last_at=times[-1],
        **common,
    )
    details = {**common, "filter": wanted.as_dict(), "letters": len(ids)}
    if poison_fixed:
        details["poison"] = len(poison)
    audit.note(transaction, rows, operator, "redrive", details)
    return Redrive(
        id=redrive_id, rca_id=rca_id, letters=len(ids), left=left, first_at=times[0], last_at=times[-1]
    )


def stop(transaction: DbTransaction, rows: Sql, redrive_id: str, reason: str, operator: str) -> int:
    """Open its letters again that no worker has, as if they had not been redriven. Return how many; 0 if it was
    stopped before.

    A letter in a handler ends there. If it is given back, or its worker dies, it becomes open then.
    """
    operator = audit.check_operator(operator)
    if not reason or not reason.strip():
        raise RedriveRefusedError("say why the redrive is stopped; the audit keeps it")
    wait_for_lock(transaction, pace_lock(_find(transaction, rows, redrive_id)["consumer"]))
    root_causes.lock(transaction, rows)
    found = _find(transaction, rows, redrive_id)
    if found["stopped_at"] is not None:
        return 0
    if not found["waiting"]:
        raise RedriveRefusedError(f"redrive {redrive_id} is over: none of its letters waits")
    opened = rows.changed(transaction, _WITHDRAW, consumer=found["consumer"], id=redrive_id)
    rows.run(transaction, _STOP, id=redrive_id, opened=opened)
    details = {"redrive": redrive_id, "reason": reason, "letters": opened}
    audit.note(transaction, rows, operator, "stop_redrive", details)
    return opened


def _find(transaction: DbTransaction, rows: Sql, redrive_id: str) -> dict[str, Any]:
    found = rows.first(transaction, _FOUND, id=redrive_id)
    if found is None:
        raise RedriveRefusedError(f"there is no redrive {redrive_id!r}; see `onceward dlq redrives`")
    return found


def redrives(transaction: DbTransaction, rows: Sql, limit: int) -> list[dict[str, Any]]:
    """Return the last redrives, and how their letters ended."""
    return rows.all(transaction, _REDRIVES, limit=limit)


def check(wanted: Filter, rca: Rca | int, rate: int, poison_fixed: bool = False) -> None:
    """Raise `RedriveRefusedError` for anything that can be refused without reading the letters."""
    if wanted.consumer is None:
        raise RedriveRefusedError("a redrive takes the letters of one consumer: name it in the filter")
    if not wanted.is_narrow:
        raise RedriveRefusedError(
            "a redrive needs a filter in addition to the consumer: an event type, a category, ids, an age or a text"
        )
    if wanted.status not in (None, Status.OPEN):
        raise RedriveRefusedError(f"only open letters can be redriven, not those that are {wanted.status}")
    if Category.POISON in (wanted.category, getattr(rca, "category", None)) and not poison_fixed:
        raise RedriveRefusedError(
            f"poison seems to kill its processes; {ONLY_FIXED}, or discard or export it"
        )
    if isinstance(rate, bool) or not isinstance(rate, int) or not 1 <= rate <= HIGHEST_RATE:
        raise RedriveRefusedError(
            f"the rate must be from 1 to {HIGHEST_RATE} letters per minute, not {rate!r}"
        )


def _find_earlier(
    transaction: DbTransaction, rows: Sql, wanted: Filter, redrive_id: str | None
) -> Redrive | None:
    if redrive_id is None:
        return None
    if not redrive_id.strip() or redrive_id != storable(redrive_id) or len(redrive_id) > 200:
        raise RedriveRefusedError("a redrive's id must have 1 to 200 characters of plain text")
    made = rows.first(transaction, _MADE, id=redrive_id)
    if made is None:
        return None
    if made["filter"] != _as_text(wanted):
        raise RedriveRefusedError(
            f"redrive {redrive_id!r} exists with another filter, {made['filter']}; give this one a different id"
        )
    return Redrive(id=made["id"], rca_id=made["rca_id"], letters=made["letters"], repeated=True)


def explain_no_match(transaction: DbTransaction, rows: Sql, wanted: Filter) -> str:
    """Say why no letter can be redriven, and what there is instead."""
    consumers = [row["consumer"] for row in rows.all(transaction, _CONSUMERS)]
    if wanted.consumer not in consumers:
        others = (
            f"there are letters of {', '.join(consumers)}" if consumers else "there are no letters at all"
        )
        return f"there is no letter of consumer {wanted.consumer!r}; {others}"
    condition, values = msgspec.structs.replace(wanted, status=None).as_sql()
    found = rows.all(transaction, _BY_STATUS.replace("{condition}", condition), **values)
    there = ", ".join(f"{row['letters']} {row['what']}" for row in found)
    poison = f"; poison seems to kill its processes: {ONLY_FIXED}" if "poison" in there else ""
    return f"no open letter that can be redriven matches; there are {there or 'none'}{poison}"


def _event_ids(row: dict[str, Any]) -> set[str]:
    """Return the ids by which the inbox may know a letter's event."""
    ids = {row["message_id"]}
    with suppress(DecodeError, ContractError):
        redriven = transaction_of(
            bytes(row["body"]),
            message_id=row["message_id"],
            event_at=row["event_at"],
            first_failed_at=row["first_failed_at"],
        )
        ids.add(Event.of(redriven).tracking_id)
    return ids


def _times(transaction: DbTransaction, rows: Sql, consumer: str, rate: int, number: int) -> list[float]:
    now = rows.steady(transaction)
    step = 60.0 / rate
    last = rows.run(transaction, _LAST_DUE, consumer=consumer).scalar()
    first = now if last is None else max(now, float(last) + step)
    return [first + position * step for position in range(number)]


def _as_text(wanted: Filter) -> str:
    return json.dumps(wanted.as_dict(), sort_keys=True)


_MADE = "SELECT id, rca_id, letters, filter FROM onceward_redrives WHERE id = :id"
# In sequence order within each aggregate, for consumers that need it.
_CHOSEN = """
    SELECT id, category, message_id, event_at, first_failed_at,
        CASE WHEN category = 'poison' THEN body END AS body
    FROM onceward_dead_letters WHERE {condition}
    ORDER BY coalesce(sequence, -1), id LIMIT :most
"""
_REMAINING = "SELECT count(*) FROM onceward_dead_letters WHERE {condition}"
# Its starts stay: they fence the effects of earlier attempts.
_FORGIVE = "UPDATE onceward_attempts SET ends = starts WHERE consumer_id = :consumer AND tracking_id = :id"
_CONSUMERS = "SELECT DISTINCT consumer FROM onceward_dead_letters ORDER BY consumer"
_BY_STATUS = """
    SELECT CASE WHEN status = 'open' THEN category ELSE status END AS what, count(*) AS letters
    FROM onceward_dead_letters WHERE {condition} GROUP BY 1 ORDER BY 1
"""
# A redrive need not wait for the times that the letters of a stopped one had.
_LAST_DUE = "SELECT max(last_at) FROM onceward_redrives WHERE consumer = :consumer AND stopped_at IS NULL"
_SCHEDULE = """
    UPDATE onceward_dead_letters SET status = 'redriven', rca_id = :rca, redrive_id = :redrive, rate = :rate,
        redrives = redrives + 1, available_at = :at, lost = 0, locked_until = NULL
    WHERE id = :id AND status = 'open'
"""
_NOTE = """
    INSERT INTO onceward_redrives (id, rca_id, consumer, filter, rate, letters, operator, made_at, last_at)
    VALUES (:redrive, :rca, :consumer, :filter, :rate, :letters, :operator, {now}, :last_at)
"""
_REDRIVES = """
    SELECT id, rca_id, consumer, filter, rate, letters, operator, made_at, last_at,
        letters - succeeded - died_again - withdrawn AS waiting, succeeded, died_again, withdrawn, stopped_at
    FROM onceward_redrives ORDER BY made_at DESC, id LIMIT :limit
"""
_FOUND = """
    SELECT consumer, stopped_at, letters - succeeded - died_again - withdrawn AS waiting
    FROM onceward_redrives WHERE id = :id
"""
_WITHDRAW = """
    UPDATE onceward_dead_letters SET status = 'open', redrive_id = NULL, redrives = redrives - 1, available_at = NULL
    WHERE consumer = :consumer AND status = 'redriven' AND redrive_id = :id AND locked_until IS NULL
"""
_STOP = "UPDATE onceward_redrives SET stopped_at = {now}, withdrawn = withdrawn + :opened WHERE id = :id"
