"""The inbox on SQLite: one writer at a time, so nothing changes between a transaction's read and write."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from onceward._ids import day_in
from onceward.db.backends import backend_of
from onceward.db.operations import run_first
from onceward.db.transaction import DbTransaction
from onceward.inbox.event import Digest
from onceward.inbox.stores.base import RESOLVE_LETTER, Store
from onceward.inbox.stores.types import Found, Key, StepTimes, begun

T = TypeVar("T")

INCREMENTAL: Final = 2
"""The value of PRAGMA auto_vacuum for a database that returns unused space on request."""
NORMAL: Final = 1
"""The value of PRAGMA synchronous for a connection whose commits, in WAL mode, do not wait for the disk."""


class SqliteStore(Store):
    name = "sqlite"
    before_all: ClassVar[dict[str, Any]] = {"row": -(2**63)}
    oldest_ahead = """
        SELECT rowid AS row FROM onceward_dedup
        WHERE consumer_id = :consumer AND keep_day = :day AND rowid > :row ORDER BY rowid LIMIT :size
    """
    purge_oldest = """
        DELETE FROM onceward_dedup
        WHERE consumer_id = :consumer AND keep_day = :day AND rowid > :row AND rowid <= :last_row
            AND NOT EXISTS (SELECT 1 FROM onceward_holds h
                WHERE h.consumer_id = :consumer AND h.tracking_id = onceward_dedup.tracking_id)
    """

    def admission(self, key: Key, digest: Digest) -> tuple[str, dict[str, Any]]:
        consumer, tracking, day = key
        now = self._clock()
        return _ADMIT, {
            "consumer": consumer,
            "tracking": tracking,
            "day": day,
            "keep_day": day if day_in(tracking) is not None else max(day, int(now // 86400)),
            "content": digest.content,
            "payload": digest.payload,
            "now": now,
        }

    def admit(self, transaction: DbTransaction, key: Key, digest: Digest) -> bool:
        sql, values = self.admission(key, digest)
        if run_first(transaction, sql, values)[0] != 1:
            return False
        run_first(transaction, _RESOLVE, values)
        return True

    def resolve_letters(
        self, transaction: DbTransaction, consumer_id: str, done: Sequence[tuple[str, Digest]]
    ) -> None:
        ids = json.dumps([each for each, _ in done])
        found = set(self.run(transaction, _OPEN_LETTERS, consumer=consumer_id, ids=ids).scalars())
        if found:
            super().resolve_letters(transaction, consumer_id, [each for each in done if each[0] in found])

    def lock(self, transaction: DbTransaction, name: str) -> bool:
        return True  # the transaction locks the whole database

    def look_up(self, transaction: DbTransaction, key: Key) -> Found:
        row = self._one(transaction, _LOOK_UP, key)
        return Found(row.digest, row.floor_day)

    def record_starts(
        self, transaction: DbTransaction, consumer_id: str, events: Sequence[Key], lease: float
    ) -> list[tuple[str, int]]:
        rows = msgspec.json.encode([(tracking_id, day) for _, tracking_id, day in events]).decode()
        result = self.run(
            transaction, _RECORD_STARTS, consumer=consumer_id, rows=rows, lease=lease, owner=self.owner
        )
        return [(tracking_id, starts) for tracking_id, starts in result.all()]

    def forget_attempts(
        self, transaction: DbTransaction, consumer_id: str, tracking_ids: Sequence[str]
    ) -> None:
        self.run(transaction, _FORGET, consumer=consumer_id, ids=json.dumps(list(tracking_ids)))

    def extend_attempts(
        self, transaction: DbTransaction, consumer_id: str, tracking_ids: Sequence[str], lease: float
    ) -> None:
        self.run(transaction, _EXTEND, consumer=consumer_id, ids=json.dumps(list(tracking_ids)), lease=lease)

    def days_below(self, connection: Connection, consumer_id: str, floor_day: int) -> list[int]:
        """Return the days before the floor for which the consumer has dedup rows."""
        return list(self.on(connection, _DAYS_BELOW, consumer=consumer_id, floor=floor_day).scalars())

    def freeze_holds(self, connection: Connection) -> None:
        """Do nothing: the transaction locks the whole database."""

    def if_free(
        self, connection: Connection, operation: Callable[[Connection], T]
    ) -> tuple[T, StepTimes] | None:
        """Run `operation(connection)` in a transaction. Returns None at once if another connection is writing.

        Then copies the WAL into the database, while others may write: otherwise a consumer's commit would do it.
        """
        is_wal = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        if connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
            connection.exec_driver_sql("ROLLBACK")  # a listener of the engine has begun one
        with _commits_without_disk(connection) if is_wal else nullcontext():
            if not _begins_at_once(connection):
                return None
            began = time.perf_counter()
            with begun(connection, "SELECT 1"):
                result = operation(connection)
                worked = time.perf_counter()
            times = StepTimes(worked - began, time.perf_counter() - began)
            connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").close()
        return result, times

    def give_back_space(self, connection: Connection, pages: int) -> int:
        """Release up to `pages` unused pages if auto_vacuum is incremental. Returns how many remain."""
        if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() != INCREMENTAL:
            return 0
        connection.exec_driver_sql(f"PRAGMA incremental_vacuum({pages})").close()
        return int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())

    def lock_migrations(self, transaction: DbTransaction) -> None:
        """Do nothing: the transaction locks the whole database."""

    def tables(self, transaction: DbTransaction) -> set[str]:
        return set(self.run(transaction, "SELECT name FROM sqlite_master WHERE type = 'table'").scalars())


@contextmanager
def _commits_without_disk(connection: Connection) -> Iterator[None]:
    """Let commits neither wait for the disk nor copy the WAL: others wait for the lock meanwhile.

    A power cut may undo the last of these commits. Any later commit of a connection that waits for the disk keeps them.
    """
    pages = connection.exec_driver_sql("PRAGMA wal_autocheckpoint").scalar_one()
    synchronous = connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
    _set(connection, "wal_autocheckpoint", 0)
    _set(connection, "synchronous", min(synchronous, NORMAL))
    try:
        yield
    finally:
        _set(connection, "wal_autocheckpoint", pages)
        _set(connection, "synchronous", synchronous)


def _begins_at_once(connection: Connection) -> bool:
    """Begin a transaction that writes, unless another connection is in one."""
    patience = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    _set(connection, "busy_timeout", 0)
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except DBAPIError as error:
        if not backend_of(connection.dialect).is_lock_timeout(error):
            raise
        return False
    finally:
        _set(connection, "busy_timeout", patience)
    return True


def _set(connection: Connection, pragma: str, value: int) -> None:
    connection.exec_driver_sql(f"PRAGMA {pragma} = {value}").close()


# The condition is part of the statement, so the horizon cannot rise between the check and the insert.
_ADMIT = """
    INSERT INTO onceward_dedup (consumer_id, tracking_id, own_day, keep_day, payload_sha256, processed_at)
    SELECT :consumer, :tracking, :day, :keep_day, :content, :now
    WHERE :day >= coalesce((SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer), :day)
    ON CONFLICT DO NOTHING
"""
_OPEN_LETTERS = """
    SELECT tracking_id FROM onceward_dead_letters
    WHERE consumer = :consumer AND tracking_id IN (SELECT value FROM json_each(:ids)) AND status = 'open'
"""
_RESOLVE = RESOLVE_LETTER.replace("{now}", ":now")
_LOOK_UP = """
    SELECT
        (SELECT payload_sha256 FROM onceward_dedup
            WHERE consumer_id = :consumer AND tracking_id = :tracking) AS digest,
        (SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer) AS floor_day
"""
_RECORD_STARTS = """
    INSERT INTO onceward_attempts (consumer_id, tracking_id, event_day, starts, ends, locked_until, last_at, owner)
    SELECT :consumer, json_extract(value, '$[0]'), json_extract(value, '$[1]'), 1, 0,
        {steady} + CAST(:lease AS double precision), {now}, :owner
    FROM json_each(:rows) WHERE true
    ON CONFLICT (consumer_id, tracking_id) DO UPDATE SET
        starts = starts + 1, locked_until = excluded.locked_until, last_at = excluded.last_at,
        owner = excluded.owner
    WHERE onceward_attempts.starts = onceward_attempts.ends
    RETURNING tracking_id, starts
"""
_FORGET = """
    DELETE FROM onceward_attempts
    WHERE consumer_id = :consumer AND tracking_id IN (SELECT value FROM json_each(:ids))
"""
# Goes day by day along the index instead of reading all rows.
_DAYS_BELOW = """
    WITH RECURSIVE days (day) AS (
        SELECT min(keep_day) FROM onceward_dedup WHERE consumer_id = :consumer
        UNION ALL
        SELECT (SELECT min(keep_day) FROM onceward_dedup WHERE consumer_id = :consumer AND keep_day > day)
        FROM days WHERE day < :floor
    )
    SELECT day FROM days WHERE day < :floor
"""
_EXTEND = """
    UPDATE onceward_attempts SET locked_until = {steady} + CAST(:lease AS double precision)
    WHERE consumer_id = :consumer AND tracking_id IN (SELECT value FROM json_each(:ids)) AND locked_until IS NOT NULL
"""
