"""Redriven letters in somebody's hands: never faster than allowed, each under a lease, and how each ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from onceward.db.transaction import DbTransaction
from onceward.deadletters import root_causes
from onceward.deadletters.burial import KEPT_SECONDS
from onceward.deadletters.letter import Failure, as_text, history_of, moment
from onceward.storage.sql import Sql, wait_for_lock

LOST_AT_MOST = 3
"""A redriven letter whose deliveries were lost so often is poison: it seems to kill its processes."""
NEVER_ENDED = "delivered again, and never came to an end"


class Handout(NamedTuple):
    """A redriven letter in somebody's hands. The token changes with each delivery."""

    id: int
    token: int
    message_id: str
    body: bytes
    lost: int
    """Earlier deliveries that never came to an end."""
    event_at: float | None
    first_failed_at: float


class HandedOut(NamedTuple):
    handouts: list[Handout]
    poisoned: list[str]
    """Message ids of those that are not handed out any more."""


def pace_lock(consumer: str) -> str:
    """Who schedules or hands out letters of a consumer does so alone."""
    return f"onceward redrive {consumer}"


def hand_out(transaction: DbTransaction, rows: Sql, consumer: str, size: int, lease: float) -> HandedOut:
    """Those whose redrive is due, no more in any minute than their rate. One that was lost before comes alone: it may
    be what kills its processes, and others must not be lost with it."""
    handed = HandedOut([], [])
    if rows.first(transaction, _IS_ANY_DUE, consumer=consumer) is None:
        return handed
    wait_for_lock(transaction, pace_lock(consumer))
    in_a_minute = int(rows.run(transaction, _HANDED_OUT, consumer=consumer).scalar_one())
    for row in rows.all(transaction, _DUE + rows.for_update, consumer=consumer, size=size):
        lost = row["lost"] + (row["locked_until"] is not None)
        if lost >= LOST_AT_MOST:
            _poison(transaction, rows, row)
            handed.poisoned.append(row["message_id"])
            continue
        if in_a_minute >= row["rate"] or (lost and handed.handouts):
            break
        if not _lease(transaction, rows, row, lost, lease):
            continue  # whoever had it has told its end at the last moment
        in_a_minute += 1
        rows.run(transaction, _NOTE_HANDOUT, consumer=consumer, id=row["id"])
        body = rows.run(transaction, _BODY, id=row["id"]).scalar_one()
        handed.handouts.append(
            Handout(
                row["id"],
                row["token"] + 1,
                row["message_id"],
                bytes(body),
                lost,
                row["event_at"],
                row["first_failed_at"],
            )
        )
        if lost:
            break
    rows.run(transaction, _FORGET_HANDOUTS, consumer=consumer)
    return handed


def succeed(transaction: DbTransaction, rows: Sql, handout: Handout) -> bool:
    """It is done. False: it was not in these hands any more."""
    if rows.changed(transaction, _SUCCEED, id=handout.id, token=handout.token) != 1:
        return False
    rows.run(transaction, _COUNT_SUCCESS, id=handout.id)
    return True


def die_again(transaction: DbTransaction, rows: Sql, handout: Handout, category: str, error: str) -> bool:
    """It failed again: open, and so is the matter that was thought to be settled."""
    row = rows.first(transaction, _HELD + rows.for_update, id=handout.id, token=handout.token)
    if row is None:
        return False
    history = _told(rows, transaction, row, error, category)
    _die(transaction, rows, row, category, "failed again", error, history)
    return True


def give_back(transaction: DbTransaction, rows: Sql, handout: Handout, delay: float) -> bool:
    return rows.changed(transaction, _GIVE_BACK, id=handout.id, token=handout.token, delay=delay) == 1


def extend(transaction: DbTransaction, rows: Sql, handouts: Sequence[Handout], lease: float) -> list[Handout]:
    """Keep these. Returns those that are in other hands."""
    return [
        each
        for each in handouts
        if rows.changed(transaction, _EXTEND, id=each.id, token=each.token, lease=lease) != 1
    ]


def _lease(transaction: DbTransaction, rows: Sql, row: dict[str, Any], lost: int, lease: float) -> bool:
    was_lost = row["locked_until"] is not None
    history = _told(rows, transaction, row, NEVER_ENDED) if was_lost else row["history"]
    values = {"id": row["id"], "token": row["token"], "lost": lost, "lease": lease}
    return rows.changed(transaction, _LEASE, history=history, more=int(was_lost), **values) == 1


def _poison(transaction: DbTransaction, rows: Sql, row: dict[str, Any]) -> None:
    root_causes.lock(transaction, rows)
    history = _told(rows, transaction, row, NEVER_ENDED, "poison")
    _die(transaction, rows, row, "poison", "never ended", row["error"], history)


def _die(
    transaction: DbTransaction,
    rows: Sql,
    row: dict[str, Any],
    category: str,
    reason: str,
    error: str,
    history: str,
) -> None:
    keep_until = rows.now(transaction) + KEPT_SECONDS
    values = {"category": category, "reason": reason, "error": error, "history": history}
    rows.run(transaction, _DIE, id=row["id"], keep_until=keep_until, **values)
    rows.run(transaction, _COUNT_DEATH, id=row["id"])
    root_causes.reopen(transaction, rows, row["id"])


def _told(
    rows: Sql, transaction: DbTransaction, row: dict[str, Any], error: str, category: str | None = None
) -> str:
    """The history, with one more failure."""
    at = moment(rows.now(transaction)).isoformat()
    return as_text((*history_of(row["history"]), Failure(at, error, row["attempts"] + 1, category)))


_WAITS = """
    consumer = :consumer AND status = 'redriven' AND available_at <= {now}
        AND (locked_until IS NULL OR locked_until <= {now})
"""
_IS_ANY_DUE = f"SELECT 1 AS due FROM onceward_dead_letters WHERE {_WAITS} LIMIT 1"
_DUE = f"""
    SELECT id, message_id, token, lost, locked_until, rate, attempts, history, error, event_at, first_failed_at
    FROM onceward_dead_letters WHERE {_WAITS} ORDER BY available_at, id LIMIT :size
"""
_BODY = "SELECT body FROM onceward_dead_letters WHERE id = :id"
# Sixty seconds to the dot is still within a minute.
_HANDED_OUT = """
    SELECT count(*) FROM onceward_redrive_handouts WHERE consumer = :consumer AND at >= {now} - 60
"""
_LEASE = """
    UPDATE onceward_dead_letters SET token = token + 1, lost = :lost, history = :history, attempts = attempts + :more,
        locked_until = {now} + CAST(:lease AS double precision)
    WHERE id = :id AND token = :token AND status = 'redriven' AND (locked_until IS NULL OR locked_until <= {now})
"""
_NOTE_HANDOUT = (
    "INSERT INTO onceward_redrive_handouts (consumer, at, letter_id) VALUES (:consumer, {now}, :id)"
)
_FORGET_HANDOUTS = "DELETE FROM onceward_redrive_handouts WHERE consumer = :consumer AND at <= {now} - 120"
_IN_HAND = "id = :id AND token = :token AND status = 'redriven' AND locked_until IS NOT NULL"
_SUCCEED = f"""
    UPDATE onceward_dead_letters SET status = 'resolved', settled_at = {{now}}, locked_until = NULL, available_at = NULL
    WHERE {_IN_HAND}
"""
_HELD = f"SELECT id, history, attempts FROM onceward_dead_letters WHERE {_IN_HAND}"
_DIE = """
    UPDATE onceward_dead_letters SET status = 'open', category = :category, reason = :reason, error = :error,
        history = :history, deaths = deaths + 1, attempts = attempts + 1, died_at = {now}, keep_until = :keep_until,
        locked_until = NULL, available_at = NULL
    WHERE id = :id
"""
_GIVE_BACK = f"""
    UPDATE onceward_dead_letters SET locked_until = NULL,
        available_at = {{now}} + CAST(:delay AS double precision) WHERE {_IN_HAND}
"""
_EXTEND = f"""
    UPDATE onceward_dead_letters SET locked_until = {{now}} + CAST(:lease AS double precision) WHERE {_IN_HAND}
"""
_OF_THIS_REDRIVE = "id = (SELECT redrive_id FROM onceward_dead_letters WHERE id = :id)"
_COUNT_SUCCESS = f"UPDATE onceward_redrives SET succeeded = succeeded + 1 WHERE {_OF_THIS_REDRIVE}"
_COUNT_DEATH = f"UPDATE onceward_redrives SET died_again = died_again + 1 WHERE {_OF_THIS_REDRIVE}"
