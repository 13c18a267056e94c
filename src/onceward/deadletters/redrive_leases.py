"""Delivery of redriven letters: never faster than allowed, each under a lease; and how each ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from onceward._process.stacks import error_stack
from onceward._text import storable
from onceward.connectors.codec import DecodeError
from onceward.connectors.lease_rules import MOST_LOST, Failure
from onceward.connectors.leased_deliveries import Held
from onceward.db.transaction import DbTransaction
from onceward.deadletters import root_causes
from onceward.deadletters.burial import category_of_error
from onceward.deadletters.dedup_records import Standing, category_for, event_in, event_of, standing
from onceward.deadletters.groups import group_of
from onceward.deadletters.letter import (
    KEPT_SECONDS,
    Category,
    decode_history,
    moment,
    transaction_of,
)
from onceward.inbox.stores.base import Store
from onceward.storage.database import Sql, wait_for_lock
from onceward.telemetry.redaction import redact
from onceward.transaction import Settlement, Transaction, Verdict

LOST_AT_MOST = 3
"""A redriven letter that lost this many leases is poison: it seems to kill its processes. If an inbox counts starts, it
decides that, unless the letter lost `MOST_LOST`."""
NEVER_ENDED = "delivered again, and never came to an end"

Redelivery = tuple[Held, int, Transaction]
"""What identifies the delivery (the letter's id, and a token that changes each time), its number, and what to
deliver."""
Death = tuple[str, str, str]
"""A letter that is no longer delivered: its message id, `poisoned` or `died_again`, and the error."""


def pace_lock(consumer: str) -> str:
    """Name the lock for scheduling or delivering letters of a consumer."""
    return f"onceward redrive {consumer}"


def deliver(
    transaction: DbTransaction,
    rows: Sql,
    store: Store,
    consumer: str,
    size: int,
    lease: float,
    owner: str | None = None,
) -> tuple[list[Redelivery], list[Death]]:
    """Lease letters whose redrive is due, no more in any minute than their rate.

    One that lost a lease, or was poison, is delivered alone: it may be what kills its processes, and others must not be
    lost with it.
    """
    delivered: list[Redelivery] = []
    deaths: list[Death] = []
    if rows.first(transaction, _IS_ANY_DUE, consumer=consumer) is None:
        return delivered, deaths
    wait_for_lock(transaction, pace_lock(consumer))
    most_lost = LOST_AT_MOST if rows.first(transaction, _HAS_INBOX, consumer=consumer) is None else MOST_LOST
    in_a_minute = int(rows.run(transaction, _DELIVERED_LATELY, consumer=consumer).scalar_one())
    for row in rows.all(transaction, _DUE + rows.for_update, consumer=consumer, size=size):
        lost = row["lost"] + (row["locked_until"] is not None)
        if lost and rows.first(transaction, _IS_STOPPED, id=row["id"]) is not None:
            _withdraw_lost(transaction, rows, store, consumer, row)
            continue
        if lost >= most_lost:
            root_causes.lock(transaction, rows)
            found = _standing(transaction, rows, store, consumer, row)
            if found is Standing.DONE:
                _resolve(transaction, rows, row["id"])
            if found is not Standing.NOT_DONE:
                continue
            _die(transaction, rows, row, Category.POISON, "never ended", NEVER_ENDED, row["error"])
            deaths.append((row["message_id"], "poisoned", NEVER_ENDED))
            continue
        alone = lost or row["category"] == Category.POISON
        if in_a_minute >= row["rate"] or (alone and delivered):
            break
        if not _lease(transaction, rows, row, lost, lease, owner):
            continue  # its worker settled it at the last moment
        in_a_minute += 1
        rows.run(transaction, _NOTE_DELIVERY, consumer=consumer, id=row["id"])
        try:
            redriven = transaction_of(
                bytes(rows.run(transaction, _BODY, id=row["id"]).scalar_one()),
                message_id=row["message_id"],
                event_at=row["event_at"],
                first_failed_at=row["first_failed_at"],
            )
        except DecodeError as error:
            root_causes.lock(transaction, rows)
            _die(transaction, rows, row, Category.CONTRACT, "failed again", str(error))
            deaths.append((row["message_id"], "died_again", str(error)))
            continue
        delivered.append(((row["id"], row["token"] + 1), lost + 1, redriven))
        if alone:
            break
    rows.run(transaction, _FORGET_DELIVERIES, consumer=consumer)
    return delivered, deaths


def settle(
    transaction: DbTransaction,
    rows: Sql,
    store: Store,
    consumer: str,
    endings: Sequence[tuple[Held, Settlement]],
) -> list[str | None]:
    """End these deliveries. Return the message id of each, or None if its lease was lost."""
    root_causes.lock(transaction, rows)
    settled = [_end(transaction, rows, store, consumer, held, settlement) for held, settlement in endings]
    root_causes.close_settled(transaction, rows)
    return settled


def extend(transaction: DbTransaction, rows: Sql, deliveries: Sequence[Held], lease: float) -> list[Held]:
    """Keep these for another lease. Return those whose lease was lost."""
    return [
        (id_, token)
        for id_, token in deliveries
        if rows.changed(transaction, _EXTEND, id=id_, token=token, lease=lease) != 1
    ]


def _end(
    transaction: DbTransaction, rows: Sql, store: Store, consumer: str, held: Held, settlement: Settlement
) -> str | None:
    identity = {"id": held[0], "token": held[1]}
    event = event_of(consumer, settlement.transaction)
    failed = settlement.verdict == Verdict.FAILED
    if settlement.verdict == Verdict.DONE or (
        failed and standing(transaction, store, event) is Standing.DONE
    ):
        row = rows.first(transaction, _SUCCEED, **identity)
        if row is not None:
            rows.run(transaction, _COUNT_SUCCESS, id=held[0])
    elif settlement.verdict == Verdict.RETURNED:
        row = rows.first(transaction, _GIVE_BACK, delay=settlement.delay, **identity)
        if row is not None and rows.first(transaction, _IS_STOPPED, id=held[0]) is not None:
            _withdraw(transaction, rows, held[0])
    else:
        row = rows.first(transaction, _HELD + rows.for_update, **identity)
        if row is not None:
            error = settlement.error
            category = category_for(transaction, store, event, category_of_error(error))
            text = "" if error is None else storable(redact(str(error)))
            where = error_stack(error)
            _die(transaction, rows, row, category, "failed again", text, where=where and storable(where))
    return None if row is None else str(row["message_id"])


def release_owner(transaction: DbTransaction, rows: Sql, owner: str) -> int:
    """End the leases of a dead process now; they count as lost. Return how many are left because they are locked."""
    skip = f"{rows.for_update} SKIP LOCKED" if rows.for_update else ""
    held = f"SELECT id FROM onceward_dead_letters WHERE {_HELD_BY} {skip}"
    rows.run(transaction, _RELEASE.replace("{among}", rows.among(held)), owner=owner)
    return int(rows.run(transaction, _COUNT_HELD, owner=owner).scalar_one())


def _standing(
    transaction: DbTransaction, rows: Sql, store: Store, consumer: str, row: dict[str, Any]
) -> Standing:
    body = bytes(rows.run(transaction, _BODY, id=row["id"]).scalar_one())
    known = {name: row[name] for name in ("message_id", "event_at", "first_failed_at")}
    return standing(transaction, store, event_in(consumer, body, **known))


def _resolve(transaction: DbTransaction, rows: Sql, letter_id: int) -> None:
    rows.run(transaction, _RESOLVE, id=letter_id)
    rows.run(transaction, _COUNT_SUCCESS, id=letter_id)
    root_causes.close_settled(transaction, rows)


def _withdraw(transaction: DbTransaction, rows: Sql, letter_id: int) -> None:
    """Open a letter whose redrive was stopped while a worker had it."""
    rows.run(transaction, _COUNT_WITHDRAWN, id=letter_id)
    rows.run(transaction, _OPEN, id=letter_id)


def _withdraw_lost(
    transaction: DbTransaction, rows: Sql, store: Store, consumer: str, row: dict[str, Any]
) -> None:
    """The same for one whose worker died, unless it had done it, or still does."""
    root_causes.lock(transaction, rows)
    found = _standing(transaction, rows, store, consumer, row)
    if found is Standing.DONE:
        _resolve(transaction, rows, row["id"])
    elif found is Standing.NOT_DONE:
        history = _extend_history(transaction, rows, row, NEVER_ENDED)
        rows.run(transaction, _NOTE_LOSS, id=row["id"], history=history)
        _withdraw(transaction, rows, row["id"])


def _lease(
    transaction: DbTransaction, rows: Sql, row: dict[str, Any], lost: int, lease: float, owner: str | None
) -> bool:
    was_lost = row["locked_until"] is not None
    history = _extend_history(transaction, rows, row, NEVER_ENDED) if was_lost else row["history"]
    values = {"id": row["id"], "token": row["token"], "lost": lost, "lease": lease, "owner": owner}
    return rows.changed(transaction, _LEASE, history=history, more=int(was_lost), **values) == 1


def _die(
    transaction: DbTransaction,
    rows: Sql,
    row: dict[str, Any],
    category: Category,
    reason: str,
    line: str,
    error: str | None = None,
    where: str | None = None,
) -> None:
    """Reopen it, and the root cause that was thought to be fixed. `line` goes into its history, and is its error unless
    another is given."""
    rows.run(
        transaction,
        _DIE,
        id=row["id"],
        category=str(category),
        reason=reason,
        error=line if error is None else error,
        group=group_of(line if error is None else error),
        history=_extend_history(transaction, rows, row, line, str(category), where),
        keep_until=rows.now(transaction) + KEPT_SECONDS,
    )
    rows.run(transaction, _COUNT_DEATH, id=row["id"])
    root_causes.reopen(transaction, rows, row["id"])


def _extend_history(
    transaction: DbTransaction,
    rows: Sql,
    row: dict[str, Any],
    error: str,
    category: str | None = None,
    where: str | None = None,
) -> str:
    at = moment(rows.now(transaction)).isoformat()
    failure = Failure(at, error, row["attempts"] + 1, category, where)
    return msgspec.json.encode((*decode_history(row["history"]), failure)).decode()


_WAITS = """
    consumer = :consumer AND status = 'redriven' AND available_at <= (SELECT {steady})
        AND (locked_until IS NULL OR locked_until <= (SELECT {steady}))
"""
"""The clock is inside a SELECT: PostgreSQL reads it once then, and the index up to there. Of a million letters a
redrive lets a few go in a minute, and a fetch would pass the others."""
_IS_ANY_DUE = f"SELECT 1 AS due FROM onceward_dead_letters WHERE {_WAITS} ORDER BY available_at LIMIT 1"
_DUE = f"""
    SELECT id, message_id, category, token, lost, locked_until, rate, attempts, history, error, event_at,
        first_failed_at
    FROM onceward_dead_letters WHERE {_WAITS} ORDER BY available_at, id LIMIT :size
"""
_HAS_INBOX = "SELECT 1 AS one FROM onceward_consumers WHERE consumer_id = :consumer"
_BODY = "SELECT coalesce(edited_body, body) FROM onceward_dead_letters WHERE id = :id"
# Exactly sixty seconds ago is still within the minute.
_DELIVERED_LATELY = """
    SELECT count(*) FROM onceward_redrive_handouts WHERE consumer = :consumer AND at >= (SELECT {steady}) - 60
"""
_LEASE = """
    UPDATE onceward_dead_letters SET token = token + 1, lost = :lost, history = :history, attempts = attempts + :more,
        locked_until = {steady} + CAST(:lease AS double precision), owner = :owner
    WHERE id = :id AND token = :token AND status = 'redriven' AND (locked_until IS NULL OR locked_until <= {steady})
"""
_HELD_BY = "owner = :owner AND status = 'redriven' AND locked_until > {steady}"
_RELEASE = "UPDATE onceward_dead_letters SET locked_until = {steady} WHERE id {among}"
_COUNT_HELD = f"SELECT count(*) FROM onceward_dead_letters WHERE {_HELD_BY}"
_NOTE_DELIVERY = (
    "INSERT INTO onceward_redrive_handouts (consumer, at, letter_id) VALUES (:consumer, {steady}, :id)"
)
_FORGET_DELIVERIES = (
    "DELETE FROM onceward_redrive_handouts WHERE consumer = :consumer AND at <= {steady} - 120"
)
_IN_FLIGHT = "id = :id AND token = :token AND status = 'redriven' AND locked_until IS NOT NULL"
_DONE = "status = 'resolved', settled_at = {now}, locked_until = NULL, available_at = NULL"
_SUCCEED = f"UPDATE onceward_dead_letters SET {_DONE} WHERE {_IN_FLIGHT} RETURNING message_id"
_RESOLVE = f"UPDATE onceward_dead_letters SET {_DONE} WHERE id = :id"
_HELD = f"SELECT id, message_id, history, attempts FROM onceward_dead_letters WHERE {_IN_FLIGHT}"
_DIE = """
    UPDATE onceward_dead_letters SET status = 'open', category = :category, reason = :reason, error = :error,
        error_group = :group,
        history = :history, deaths = deaths + 1, attempts = attempts + 1, died_at = {now}, keep_until = :keep_until,
        locked_until = NULL, available_at = NULL
    WHERE id = :id
"""
_GIVE_BACK = f"""
    UPDATE onceward_dead_letters SET locked_until = NULL,
        available_at = {{steady}} + CAST(:delay AS double precision) WHERE {_IN_FLIGHT} RETURNING message_id
"""
_EXTEND = f"""
    UPDATE onceward_dead_letters SET locked_until = {{steady}} + CAST(:lease AS double precision) WHERE {_IN_FLIGHT}
"""
_OF_THIS_REDRIVE = "id = (SELECT redrive_id FROM onceward_dead_letters WHERE id = :id)"
_COUNT_SUCCESS = f"UPDATE onceward_redrives SET succeeded = succeeded + 1 WHERE {_OF_THIS_REDRIVE}"
_COUNT_WITHDRAWN = f"UPDATE onceward_redrives SET withdrawn = withdrawn + 1 WHERE {_OF_THIS_REDRIVE}"
_IS_STOPPED = (
    f"SELECT 1 AS stopped FROM onceward_redrives WHERE stopped_at IS NOT NULL AND {_OF_THIS_REDRIVE}"
)
_OPEN = """
    UPDATE onceward_dead_letters SET status = 'open', redrive_id = NULL, locked_until = NULL, available_at = NULL
    WHERE id = :id
"""
_NOTE_LOSS = "UPDATE onceward_dead_letters SET history = :history, attempts = attempts + 1 WHERE id = :id"
_COUNT_DEATH = f"UPDATE onceward_redrives SET died_again = died_again + 1 WHERE {_OF_THIS_REDRIVE}"
