"""The inbox on PostgreSQL: a partition for each day, advisory locks instead of waiting, the server's clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from onceward.db.operations import key_of
from onceward.db.transaction import DbTransaction
from onceward.inbox.errors import Breach, ContractError
from onceward.inbox.stores import partitions
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.partitions import MAINTENANCE
from onceward.inbox.stores.types import Found, Key, MissingDay, as_date

CHECK_VIOLATION: Final = "23514"
DAYS_AHEAD: Final = 2
"""How many days in the future an event's own day may be: clocks differ, but each day needs a partition."""


class PostgreSqlStore(Store):
    name = "postgresql"
    has_days = True
    records = """(SELECT consumer_id, event_day FROM onceward_dedup
        UNION ALL SELECT consumer_id, event_day FROM onceward_kept)"""
    ledgers = ("onceward_kept", "onceward_attempts", "onceward_effects")
    limit_waiting = "SELECT set_config('lock_timeout', '5s', true)"

    def admit(self, transaction: DbTransaction, key: Key, digest: bytes) -> bool:
        lock = key_of(f"{key.consumer_id}:{key.tracking_id}")
        try:
            return self._execute(transaction, _ADMIT, key, digest=digest, lock=lock) == 1
        except IntegrityError as error:
            if getattr(error.orig, "sqlstate", None) == CHECK_VIOLATION:
                raise MissingDay(key.day) from error
            raise

    def lock(self, transaction: DbTransaction, name: str) -> bool:
        return bool(self.run(transaction, _LOCK, lock=key_of(name)).scalar_one())

    def look_up(self, transaction: DbTransaction, key: Key) -> Found:
        row = self._one(transaction, _LOOK_UP, key)
        return Found(row.digest, row.floor_day)

    def prepare_day(self, connection: Connection, key: Key) -> None:
        today = int(self.on(connection, "SELECT {now}").scalar_one()) // 86400
        if key.day > today + DAYS_AHEAD:
            raise ContractError(
                f"its own day, {as_date(key.day)}, is in the future, so no dedup row can be stored for it; "
                "fix created_at at the producer",
                Breach.ENVELOPE,
                key.tracking_id,
            )
        floor = self.on(connection, _FLOOR, consumer=key.consumer_id).scalar()
        if floor is not None and key.day < floor:
            return
        # Together with the coming days, so the first event of a day does not have to wait for this.
        for day in {key.day, today, today + 1}:
            partitions.make(connection, day)

    def record_starts(
        self, transaction: DbTransaction, consumer_id: str, events: Sequence[Key], lease: float
    ) -> list[tuple[str, int]]:
        rows = json.dumps([(key.tracking_id, key.day) for key in events])
        result = self.run(
            transaction, _RECORD_STARTS, consumer=consumer_id, rows=rows, lease=lease, owner=self.owner
        )
        return [(tracking_id, starts) for tracking_id, starts in result]

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
_ADMIT = f"""
    INSERT INTO onceward_dedup (event_day, consumer_id, tracking_id, payload_sha256)
    SELECT CAST(:day AS bigint), CAST(:consumer AS text), CAST(:tracking AS text), CAST(:digest AS bytea)
    FROM (SELECT {_TRY_LOCK} AS free OFFSET 0) AS one
    WHERE one.free
        AND :day >= coalesce((SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer), :day)
    ON CONFLICT DO NOTHING
"""
_LOCK = f"SELECT {_TRY_LOCK}"
_LOOK_UP = """
    SELECT
        coalesce(
            (SELECT payload_sha256 FROM onceward_dedup
                WHERE event_day = :day AND consumer_id = :consumer AND tracking_id = :tracking),
            (SELECT payload_sha256 FROM onceward_kept
                WHERE event_day = :day AND consumer_id = :consumer AND tracking_id = :tracking)) AS digest,
        (SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer) AS floor_day
"""
_FLOOR = "SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer"
_RECORD_STARTS = """
    INSERT INTO onceward_attempts (consumer_id, tracking_id, event_day, starts, ends, locked_until, last_at, owner)
    SELECT :consumer, value ->> 0, CAST(value ->> 1 AS bigint), 1, 0, {now} + CAST(:lease AS double precision), {now},
        CAST(:owner AS text)
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
    UPDATE onceward_attempts SET locked_until = {now} + CAST(:lease AS double precision)
    WHERE consumer_id = :consumer AND tracking_id = ANY(:ids) AND locked_until IS NOT NULL
"""
