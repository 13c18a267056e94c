"""Looking at dead letters, and what people do with them. Every function runs in somebody's transaction."""

from __future__ import annotations

from typing import Any

from onceward.db.transaction import DbTransaction
from onceward.deadletters import rcas
from onceward.deadletters.filters import Filter
from onceward.deadletters.letter import DeadLetter, from_row
from onceward.storage.sql import Sql


def find(
    transaction: DbTransaction, rows: Sql, wanted: Filter, limit: int, after: int = 0
) -> list[DeadLetter]:
    condition, values = wanted.as_sql()
    sql = f"""
        SELECT {_COLUMNS} FROM onceward_dead_letters WHERE id > :after AND {condition} ORDER BY id LIMIT :limit
    """
    return [from_row(row) for row in rows.all(transaction, sql, limit=limit, after=after, **values)]


def count(transaction: DbTransaction, rows: Sql, wanted: Filter) -> int:
    condition, values = wanted.as_sql()
    sql = f"SELECT count(*) FROM onceward_dead_letters WHERE {condition}"
    return int(rows.run(transaction, sql, **values).scalar_one())


def body(transaction: DbTransaction, rows: Sql, letter_id: int) -> bytes | None:
    value = rows.run(
        transaction, "SELECT body FROM onceward_dead_letters WHERE id = :id", id=letter_id
    ).scalar()
    return None if value is None else bytes(value)


def event_at(transaction: DbTransaction, rows: Sql, letter_id: int) -> float | None:
    """The event's own time, where the body does not tell it."""
    value = rows.run(
        transaction, "SELECT event_at FROM onceward_dead_letters WHERE id = :id", id=letter_id
    ).scalar()
    return None if value is None else float(value)


def set_hold(transaction: DbTransaction, rows: Sql, wanted: Filter, reason: str | None) -> int:
    condition, values = wanted.as_sql()
    sql = f"UPDATE onceward_dead_letters SET hold = :reason WHERE {condition}"
    return rows.changed(transaction, sql, reason=reason, **values)


def discard(transaction: DbTransaction, rows: Sql, wanted: Filter) -> int:
    """Nobody will do anything about these. They are kept as long as all others."""
    rcas.lock(transaction, rows)
    condition, values = wanted.as_sql()
    sql = f"""
        UPDATE onceward_dead_letters SET status = 'discarded', settled_at = {{now}}
        WHERE status = 'open' AND hold IS NULL AND {condition}
    """
    letters = rows.changed(transaction, sql, **values)
    rcas.close_settled(transaction, rows)
    return letters


def purge(transaction: DbTransaction, rows: Sql, size: int) -> int:
    """Remove some that are settled, old enough and not held."""
    return rows.changed(transaction, _PURGE, size=size)


def stats(transaction: DbTransaction, rows: Sql) -> list[dict[str, Any]]:
    return rows.all(transaction, _STATS)


_COLUMNS = """
    id, consumer, message_id, origin, event_type, aggregate_id, sequence, category, reason, error, attempts, deaths,
    history, trace_id, first_failed_at, died_at, keep_until, hold, status, rca_id, redrive_id, redrives, available_at,
    settled_at, length(body) AS size, body_sha256
"""
_MAY_GO = "status IN ('resolved', 'discarded') AND hold IS NULL AND keep_until <= {now}"
# The condition stands there twice: the outer one is looked at again should somebody have changed the row meanwhile.
_PURGE = f"""
    DELETE FROM onceward_dead_letters
    WHERE id IN (SELECT id FROM onceward_dead_letters WHERE {_MAY_GO} LIMIT :size) AND {_MAY_GO}
"""
_STATS = """
    SELECT consumer, event_type, category, status, count(*) AS letters, min(died_at) AS oldest, max(died_at) AS newest
    FROM onceward_dead_letters GROUP BY consumer, event_type, category, status
    ORDER BY consumer, event_type, category, status
"""
