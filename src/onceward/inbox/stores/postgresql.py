"""The inbox on PostgreSQL: a partition for each day, advisory locks instead of waiting, the server's clock.

The key of a partitioned table must contain the day, so the day must follow from the id alone: with any other day, a
second row of one id would be possible. It is the day in a UUID of version 7. All other ids share one partition.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from onceward._ids import day_in
from onceward.db.operations import key_of
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.inbox.event import Digest
from onceward.inbox.stores import partitions
from onceward.inbox.stores.base import RESOLVE_LETTER, Store
from onceward.inbox.stores.partitions import MAINTENANCE
from onceward.inbox.stores.types import Found, Key, MissingDay, as_date
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.inbox"))

CHECK_VIOLATION: Final = "23514"
OTHER: Final = -1
"""Stands for the day in the partition of ids that contain none."""
DAYS_AHEAD: Final = 2
"""How many days in the future the day in an id may be as a matter of course: clocks differ."""
OWN_DAYS: Final = (7, 7)
"""Days before and after today that get a partition of their own."""


class PostgreSqlStore(Store):
    name = "postgresql"
    group_size = (
        50  # with more than 64 savepoints, other sessions would have to look up whose rows are visible
    )
    groups_at_once = 4
    records = """(SELECT consumer_id, coalesce(own_day, event_day) AS own_day FROM onceward_dedup
        UNION ALL SELECT consumer_id, event_day FROM onceward_kept)"""
    ledgers = ("onceward_kept", *Store.ledgers)
    this_event = f"{Store.this_event} AND event_day = :place"
    before_all: ClassVar[dict[str, Any]] = {"age": "-infinity", "row": "(0,0)"}
    oldest_ahead = """
        SELECT CAST(processed_at AS text) AS age, CAST(ctid AS text) AS row FROM onceward_dedup_other
        WHERE consumer_id = :consumer AND processed_at < to_timestamp(CAST(:floor AS bigint) * 86400.0)
            AND processed_at >= CAST(:age AS timestamptz)
            AND (processed_at, ctid) > (CAST(:age AS timestamptz), CAST(:row AS tid))
        ORDER BY processed_at, ctid LIMIT :size
    """
    purge_oldest = """
        DELETE FROM onceward_dedup_other WHERE consumer_id = :consumer
            AND processed_at BETWEEN CAST(:age AS timestamptz) AND CAST(:last_age AS timestamptz)
            AND (processed_at, ctid) > (CAST(:age AS timestamptz), CAST(:row AS tid))
            AND (processed_at, ctid) <= (CAST(:last_age AS timestamptz), CAST(:last_row AS tid)) AND own_day < :floor
            AND NOT EXISTS (SELECT 1 FROM onceward_holds h
                WHERE h.consumer_id = :consumer AND h.tracking_id = onceward_dedup_other.tracking_id)
    """
    limit_waiting = (
        "SELECT set_config('lock_timeout', '5s', true), set_config('statement_timeout', '30s', true)"
    )
    without_flush = f"{limit_waiting}, set_config('synchronous_commit', 'off', true)"

    def partition(self, key: Key) -> int | None:
        return day_in(key.tracking_id)

    def admission(self, key: Key, digest: Digest) -> tuple[str, dict[str, Any]]:
        consumer, tracking, day = key
        own = self.partition(key)
        return _ADMIT_ONE, {
            "consumer": consumer,
            "tracking": tracking,
            "day": day,
            "place": OTHER if own is None else own,
            "content": digest.content,
            "payload": digest.payload,
            "lock": key_of(f"{consumer}:{tracking}"),
            "own_day": day if own is None else None,
        }

    def explain(self, error: IntegrityError, key: Key) -> Exception | None:
        day = self.partition(key)
        missing = day is not None and getattr(error.orig, "sqlstate", None) == CHECK_VIOLATION
        return MissingDay(day) if missing and day is not None else None

    def admit(self, transaction: DbTransaction, key: Key, digest: Digest) -> bool:
        _, values = self.admission(key, digest)
        try:
            admitted, stale = self.run_first(transaction, _ADMIT_AND_RESOLVE, values)[1]
        except IntegrityError as error:
            meaning = self.explain(error, key)
            if meaning is None:
                raise
            raise meaning from error
        if stale:
            self._execute(transaction, RESOLVE_LETTER, key, **digest._asdict())
        return bool(admitted)

    def resolve_letters(
        self, transaction: DbTransaction, consumer_id: str, done: Sequence[tuple[str, Digest]]
    ) -> None:
        ids = [each for each, _ in done]
        # First without their digests, which take longer to send than all else: nearly always there is none.
        found = set(self.run(transaction, _OPEN_LETTERS, consumer=consumer_id, ids=ids).scalars())
        if found:
            super().resolve_letters(transaction, consumer_id, [each for each in done if each[0] in found])

    def lock(self, transaction: DbTransaction, name: str) -> bool:
        return bool(self.run(transaction, _LOCK, lock=key_of(name)).scalar_one())

    def look_up(self, transaction: DbTransaction, key: Key) -> Found:
        row = self._one(transaction, _LOOK_UP, key)
        return Found(row.digest, row.floor_day)

    def _values(self, key: Key) -> dict[str, Any]:
        day = self.partition(key)
        return {**super()._values(key), "place": OTHER if day is None else day}

    def prepare_day(self, connection: Connection, key: Key) -> None:
        today = self._today(connection)
        floor = self.on(connection, _FLOOR, consumer=key.consumer_id).scalar()
        if floor is not None and key.day < floor:
            return
        if key.day > today + DAYS_AHEAD:
            _log.warning(
                "event %s: the day in its id, %s, is in the future, so its record stays until then. If the id is a "
                "UUID of version 7, check the clock of its producer",
                key.tracking_id,
                as_date(key.day),
            )
        near = range(today - OWN_DAYS[0], today + OWN_DAYS[1] + 1)
        # Together with the coming days, so the first event of a day does not have to wait for this.
        for day in {key.day, today, today + 1}:
            partitions.make(connection, day, near)

    def _today(self, connection: Connection) -> int:
        return int(self.on(connection, "SELECT {now}").scalar_one()) // 86400

    def check_role(self, transaction: DbTransaction) -> None:
        row = self.first(transaction, _ROLE)
        if row is None or (row["owns"] and row["creates"]):
            return
        problem = (
            f"may not create tables in schema {row['place']!r}"
            if row["owns"]
            else f"does not own onceward_dedup, as {row['owner']!r} does"
        )
        remedy = f"GRANT CREATE ON SCHEMA {row['place']}" if row["owns"] else f"GRANT {row['owner']}"
        raise ConfigurationError(
            f"the role {row['role']!r} {problem}, so it cannot add the partition of a new day, and no event of that "
            f"day would run. Consume with the role that migrates, or run `{remedy} TO {row['role']}`"
        )

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
        self.run(transaction, _FORGET, consumer=consumer_id, ids=list(tracking_ids))

    def extend_attempts(
        self, transaction: DbTransaction, consumer_id: str, tracking_ids: Sequence[str], lease: float
    ) -> None:
        self.run(transaction, _EXTEND, consumer=consumer_id, ids=list(tracking_ids), lease=lease)

    def freeze_holds(self, connection: Connection) -> None:
        connection.exec_driver_sql("LOCK TABLE onceward_holds, onceward_consumers IN SHARE MODE")

    def lock_migrations(self, transaction: DbTransaction) -> None:
        self.run(transaction, "SELECT pg_advisory_xact_lock(:lock)", lock=key_of(MAINTENANCE))

    def tables(self, transaction: DbTransaction) -> set[str]:
        return set(self.run(transaction, _TABLES).scalars())


# Advisory locks span the whole database. An inbox in another schema has other events and must not block this one.
_TRY_LOCK = (
    "pg_try_advisory_xact_lock(CAST(:lock AS bigint) # CAST(CAST('onceward_dedup' AS regclass) AS bigint))"
)
# One statement, so a new event costs one round trip. Without the lock no row is written; `look_up` tells this case
# from a duplicate.
_ADMIT_ONE = f"""
    INSERT INTO onceward_dedup (event_day, consumer_id, tracking_id, payload_sha256, own_day)
    SELECT CAST(:place AS bigint), CAST(:consumer AS text), CAST(:tracking AS text), CAST(:content AS bytea),
        CAST(:own_day AS bigint)
    FROM (SELECT {_TRY_LOCK} AS free OFFSET 0) AS one
    WHERE one.free
        AND :day >= coalesce((SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer), :day)
    ON CONFLICT DO NOTHING
"""
# A statement does not see what commits after it has begun, and the last holder of the lock may have buried the event in
# the moment before it got the lock. Then a transaction has committed since: one that ran when the statement began, or
# one with a number below that of the insert. If this transaction had its number before, later ones are unknown.
# Without OFFSET 0, the planner would ask for the number, and so assign it, before the lock.
_STALE = """
    SELECT EXISTS (SELECT 1 FROM numbered WHERE already) OR EXISTS (
        SELECT 1 FROM (
            SELECT pg_snapshot_xip(began) AS id
            UNION ALL
            SELECT CAST(CAST(number AS text) AS xid8) FROM generate_series(
                CAST(CAST(pg_snapshot_xmax(began) AS text) AS bigint), CAST(CAST(own AS text) AS bigint) - 1) AS number
        ) AS others WHERE pg_xact_status(id) = 'committed')
    FROM (SELECT pg_current_snapshot() AS began, pg_current_xact_id() AS own OFFSET 0) AS this
"""
_ADMIT_AND_RESOLVE = f"""
    WITH numbered AS MATERIALIZED (SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS already),
        admitted AS ({_ADMIT_ONE.replace("AS one", "AS one, numbered")} RETURNING 1),
        resolved AS ({RESOLVE_LETTER} AND EXISTS (SELECT 1 FROM admitted))
    SELECT EXISTS (SELECT 1 FROM admitted) AS admitted,
        CASE WHEN EXISTS (SELECT 1 FROM admitted) THEN ({_STALE}) ELSE false END AS stale
"""
_OPEN_LETTERS = """
    SELECT tracking_id FROM onceward_dead_letters
    WHERE consumer = :consumer AND tracking_id = ANY(:ids) AND status = 'open'
"""
_LOCK = f"SELECT {_TRY_LOCK}"
_LOOK_UP = """
    SELECT
        coalesce(
            (SELECT payload_sha256 FROM onceward_dedup
                WHERE event_day = :place AND consumer_id = :consumer AND tracking_id = :tracking),
            (SELECT payload_sha256 FROM onceward_kept
                WHERE event_day = :place AND consumer_id = :consumer AND tracking_id = :tracking)) AS digest,
        (SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer) AS floor_day
"""
_ROLE = """
    SELECT current_user AS role, pg_get_userbyid(c.relowner) AS owner, n.nspname AS place,
        pg_has_role(c.relowner, 'USAGE') AS owns, has_schema_privilege(n.oid, 'CREATE') AS creates
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = CAST('onceward_dedup' AS regclass)
"""
_FLOOR = "SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer"
_RECORD_STARTS = """
    INSERT INTO onceward_attempts (consumer_id, tracking_id, event_day, starts, ends, locked_until, last_at, owner)
    SELECT :consumer, value ->> 0, CAST(value ->> 1 AS bigint), 1, 0, {steady} + CAST(:lease AS double precision),
        {now}, CAST(:owner AS text)
    FROM jsonb_array_elements(CAST(:rows AS jsonb)) AS value
    ON CONFLICT (consumer_id, tracking_id) DO UPDATE SET
        starts = onceward_attempts.starts + 1, locked_until = excluded.locked_until, last_at = excluded.last_at,
        owner = excluded.owner
    WHERE onceward_attempts.starts = onceward_attempts.ends
    RETURNING tracking_id, starts
"""
_FORGET = "DELETE FROM onceward_attempts WHERE consumer_id = :consumer AND tracking_id = ANY(:ids)"
_TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = ANY (current_schemas(false))"
_EXTEND = """
    UPDATE onceward_attempts SET locked_until = {steady} + CAST(:lease AS double precision)
    WHERE consumer_id = :consumer AND tracking_id = ANY(:ids) AND locked_until IS NOT NULL
"""
