"""The partitions of a PostgreSQL inbox: tables that are attached to `onceward_dedup` and detached again.

A day of about now has a partition of its own, which a purge drops as a whole. Ids with days far from now are stray: a
replay, a wrong clock, an attack. A partition for such a day takes the days around it that have none,
so there are never hundreds of tables. Where a row is follows from the day in its id alone, whatever the partitions are:
a record is found again, and there is no second one.

    ── make ──► ATTACHED ── detach ──► DETACHING ── detach ──► DETACHED ── drop ──►
                   ▲                                               │
                   └────────────────────── make ◄──────────────────┘

No consumer waits for any of this: attaching and detaching take locks that do not conflict with reading and writing
rows. A crash leaves a table in one of these states, and the next purge continues from there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from enum import StrEnum
from typing import Final, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from onceward.db.backends import backend_of
from onceward.db.operations import key_of
from onceward.errors import OncewardError
from onceward.inbox.errors import LATER, Busy
from onceward.inbox.stores.types import as_date, begun

MAINTENANCE: Final = "onceward inbox partitions"
PURGE: Final = "onceward inbox purge"

SPAN: Final = 128
"""Days of a partition for days far from now, at most: 75 tables for all days that an id can contain."""
LOCK_WAIT: float = 2.0
"""Seconds that a purge waits for a lock. Longer than deadlock_timeout, after which a blocking autovacuum gives up."""
SNAPSHOT_WAIT: float = 60.0
"""Seconds that a purge waits for statements that began before the horizon was raised. Consumers are not blocked."""

READ_COMMITTED: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"
"""Regardless of the engine's level: after taking a lock, the purge must see everything committed before."""


class PurgeInProgressError(OncewardError):
    """Another process is already purging this database."""


class Blocked(Exception):
    """Another transaction blocks a purge for longer than it waits."""


class PartitionState(StrEnum):
    ATTACHED = "attached"
    DETACHING = "detaching"
    """Detaching has begun: rows of the day are invisible and cannot be written, but the table is not detached yet."""
    DETACHED = "detached"


class Partition(NamedTuple):
    name: str
    day: int
    """Its first day, and often the only one."""
    last: int
    state: PartitionState


class Dropped(NamedTuple):
    rows: int
    kept: int
    """How many of these are on hold and were copied."""
    seconds: float


def partitions(connection: Connection) -> list[Partition]:
    """Return all partitions, oldest first, including those that an interrupted purge left behind."""
    found = []
    for name, digits, is_attached, is_pending in connection.exec_driver_sql(_PARTITIONS):
        if re.fullmatch(r"\d{8}(_\d{8})?", digits):
            first, last = _day(digits[:8]), _day(digits[-8:])
            attached = PartitionState.ATTACHED if is_attached else PartitionState.DETACHED
            found.append(Partition(name, first, last, PartitionState.DETACHING if is_pending else attached))
    return sorted(found, key=lambda each: each.day)


def partition_of(day: int, last: int | None = None) -> str:
    days = as_date(day) if last in (None, day) else f"{as_date(day)}_{as_date(last)}"
    return f"onceward_dedup_{days}".replace("-", "")


def make(connection: Connection, day: int, near: range | None = None) -> None:
    """Create the partition of a day as a separate table, then attach it: CREATE … PARTITION OF would wait for every
    open transaction and block all others. A table that a purge detached but did not drop is attached again as is.

    For a day outside of `near` it takes up to `SPAN` days, except those, and those that have a partition."""
    with begun(connection, READ_COMMITTED):
        _maintain(connection)
        every = partitions(connection)
        found = next((each for each in every if each.day <= day <= each.last), None)
        if found is None:
            found = _create(connection, *_days_around(day, near, every))
        if found.state is PartitionState.DETACHING:
            raise Busy(f"partition {found.name} is being removed", delay=LATER.delay())
        if found.state is PartitionState.DETACHED:
            _attach(connection, found)


def _days_around(day: int, near: range | None, every: list[Partition]) -> tuple[int, int]:
    if near is None or day in near:
        return day, day
    first = day // SPAN * SPAN
    last = first + SPAN - 1
    taken = [(each.day, each.last) for each in every] + [(near.start, near.stop - 1)]
    return (
        max([first, *(end + 1 for _, end in taken if end < day)]),
        min([last, *(begin - 1 for begin, _ in taken if begin > day)]),
    )


def _create(connection: Connection, first: int, last: int) -> Partition:
    name = partition_of(first, last)
    connection.exec_driver_sql(f"CREATE TABLE {name} (LIKE onceward_dedup INCLUDING ALL)")
    connection.exec_driver_sql(
        f"ALTER TABLE {name} ADD CONSTRAINT {name}_day CHECK (event_day >= {first} AND event_day < {last + 1})"
    )
    return Partition(name, first, last, PartitionState.DETACHED)


def days_in(connection: Connection, partition: Partition) -> list[int]:
    """Return the days of which a partition has rows. Jumps along the index."""
    if partition.day == partition.last:
        return [partition.day]
    return list(connection.exec_driver_sql(_DAYS_IN.format(table=partition.name)).scalars())


def consumers_in(connection: Connection, partition: Partition) -> set[str]:
    """Return the consumers with rows in a partition. Jumps along the index, however many rows there are."""
    rows = connection.exec_driver_sql(_CONSUMERS_IN.format(table=partition.name))
    return set(rows.scalars())


def keep_held(connection: Connection, partition: Partition) -> int:
    """Copy single rows on hold to `onceward_kept`, where they are found without their partition."""
    return int(connection.exec_driver_sql(_KEEP_HELD.format(table=partition.name)).rowcount)


def detach(connection: Connection, partition: Partition) -> None:
    """Detach a partition without blocking other transactions. Raises `Blocked` if it has to wait too long itself; the
    next purge then continues."""
    if partition.state is PartitionState.ATTACHED:
        try:
            connection.exec_driver_sql(
                f"ALTER TABLE onceward_dedup DETACH PARTITION {partition.name} CONCURRENTLY"
            )
            return
        except DBAPIError as error:
            if not _is_lock_timeout(connection, error):
                raise
        # CONCURRENTLY waits for every transaction that used the inbox; FINALIZE only for those with an old snapshot.
        partition = partition._replace(state=_state(connection, partition.day) or PartitionState.ATTACHED)
    if partition.state is PartitionState.DETACHING:
        with or_blocked(connection, f"{partition.name} is not detached yet"):
            connection.exec_driver_sql(
                f"ALTER TABLE onceward_dedup DETACH PARTITION {partition.name} FINALIZE"
            )
    elif partition.state is PartitionState.ATTACHED:
        raise Blocked(f"{partition.name} could not be detached: {in_the_way(connection)}")


def drop(
    connection: Connection,
    partition: Partition,
    freeze_holds: Callable[[Connection], None],
    is_needed: Callable[[Partition], bool],
) -> Dropped | None:
    """Drop a detached table after copying its rows on hold. If it is needed after all, attach it again and return None.

    A detached table is no longer written to, so these checks are final.
    """
    rows = int(connection.exec_driver_sql(f"SELECT count(*) FROM {partition.name}").scalar_one())
    began = time.perf_counter()
    with or_blocked(connection, f"{partition.name} is not dropped yet"), begun(connection, READ_COMMITTED):
        _maintain(connection)
        if _state(connection, partition.day) is not PartitionState.DETACHED:
            return None
        freeze_holds(connection)
        if is_needed(partition):
            _attach(connection, partition)
            return None
        keep_held(connection, partition)
        kept = int(connection.exec_driver_sql(_COUNT_HELD.format(table=partition.name)).scalar_one())
        connection.exec_driver_sql(f"DROP TABLE {partition.name}")
    return Dropped(rows, kept, time.perf_counter() - began)


@contextmanager
def only_purger(connection: Connection) -> Iterator[None]:
    """Raise `PurgeInProgressError` if another purge is running. The lock belongs to the connection and ends with it."""
    oid = connection.exec_driver_sql("SELECT 'onceward_dedup'::regclass::oid::bigint").scalar_one()
    lock = key_of(f"{PURGE} {oid}")
    if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({lock})").scalar_one():
        raise PurgeInProgressError(
            f"another purge is running: {_holder(connection, lock)}; wait until it ends, then run this one again"
        )
    try:
        connection.exec_driver_sql(f"SET lock_timeout = {int(LOCK_WAIT * 1000)}")
        yield
        connection.exec_driver_sql("RESET lock_timeout")
        connection.exec_driver_sql(f"SELECT pg_advisory_unlock({lock})")
    except BaseException:
        connection.invalidate()  # the connection must not return to the pool with the lock
        raise


def await_old_snapshots(connection: Connection) -> None:
    """Wait until every running statement sees the horizon that was just raised.

    Another statement could admit an event whose record is being removed. Usually one statement takes a moment; under
    REPEATABLE READ it is the whole transaction. Seeing sessions of other roles requires `pg_read_all_stats`.
    """
    until = time.monotonic() + SNAPSHOT_WAIT
    old = _snapshots(connection)
    while old := {each: owner for each, owner in _snapshots(connection).items() if each in old}:
        if time.monotonic() > until:
            raise Blocked(
                "nothing was removed: a transaction does not see the raised horizon yet "
                f"({'; '.join(old.values())})"
            )
        connection.exec_driver_sql("SELECT pg_sleep(0.01)")


def in_the_way(connection: Connection) -> str:
    """Describe the oldest open transaction that has used the inbox."""
    process = connection.exec_driver_sql(_IN_THE_WAY).scalar()
    return "a lock was not released in time" if process is None else f"waiting for {process}"


def _maintain(connection: Connection) -> None:
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({key_of(MAINTENANCE)})")


def _attach(connection: Connection, partition: Partition) -> None:
    connection.exec_driver_sql(
        f"ALTER TABLE onceward_dedup ATTACH PARTITION {partition.name} "
        f"FOR VALUES FROM ({partition.day}) TO ({partition.last + 1})"
    )


def _day(digits: str) -> int:
    return (date.fromisoformat(digits) - date(1970, 1, 1)).days


def _state(connection: Connection, day: int) -> PartitionState | None:
    return next((each.state for each in partitions(connection) if each.day == day), None)


def _snapshots(connection: Connection) -> dict[tuple[object, ...], str]:
    rows = connection.exec_driver_sql(_SNAPSHOTS)
    return {(pid, began, xmin): owner for pid, began, xmin, owner in rows}


def _holder(connection: Connection, lock: int) -> str:
    high, low = (lock >> 32) & 0xFFFFFFFF, lock & 0xFFFFFFFF
    found = connection.exec_driver_sql(_HOLDER.format(high=high, low=low)).scalar()
    return "a process that has ended by now" if found is None else str(found)


@contextmanager
def or_blocked(connection: Connection, problem: str) -> Iterator[None]:
    """Raise `Blocked` if a lock is not released in time."""
    try:
        yield
    except DBAPIError as error:
        if not _is_lock_timeout(connection, error):
            raise
        raise Blocked(f"{problem}: {in_the_way(connection)}") from error


def _is_lock_timeout(connection: Connection, error: DBAPIError) -> bool:
    return backend_of(connection.dialect).is_lock_timeout(error)


_PARTITIONS = """
    SELECT c.oid::regclass::text, substr(c.relname, length('onceward_dedup_') + 1), i.inhrelid IS NOT NULL,
        coalesce(i.inhdetachpending, false)
    FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = 'onceward_dedup'::regclass
    WHERE c.relkind = 'r' AND starts_with(c.relname, 'onceward_dedup_')
        AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'onceward_dedup'::regclass)
"""
_CONSUMERS_IN = """
    WITH RECURSIVE found (id) AS (
        SELECT min(consumer_id) FROM {table}
        UNION ALL
        SELECT (SELECT min(consumer_id) FROM {table} WHERE consumer_id > id) FROM found WHERE id IS NOT NULL
    )
    SELECT id FROM found WHERE id IS NOT NULL
"""
_DAYS_IN = """
    WITH RECURSIVE found (day) AS (
        SELECT min(event_day) FROM {table}
        UNION ALL
        SELECT (SELECT min(event_day) FROM {table} WHERE event_day > day) FROM found WHERE day IS NOT NULL
    )
    SELECT day FROM found WHERE day IS NOT NULL
"""
_HELD = "onceward_holds h ON h.consumer_id = t.consumer_id AND h.tracking_id = t.tracking_id"
_KEEP_HELD = f"""
    INSERT INTO onceward_kept (event_day, consumer_id, tracking_id, payload_sha256, processed_at, outcome)
    SELECT t.event_day, t.consumer_id, t.tracking_id, t.payload_sha256, t.processed_at, t.outcome
    FROM {{table}} t JOIN {_HELD} ON CONFLICT DO NOTHING
"""
_COUNT_HELD = f"SELECT count(*) FROM {{table}} t JOIN {_HELD}"
_WHO = """
    concat('process ', a.pid, coalesce(' of ' || nullif(a.application_name, ''), ''),
        coalesce(' at ' || host(a.client_addr), ''),
        coalesce(', since ' || to_char(a.{since}, 'YYYY-MM-DD HH24:MI:SS'), ''))
"""
_SNAPSHOTS = f"""
    SELECT a.pid, a.xact_start, a.backend_xmin::text, {_WHO.format(since="xact_start")}
    FROM pg_stat_activity a
    WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
        AND a.backend_xmin IS NOT NULL
"""
_IN_THE_WAY = f"""
    SELECT {_WHO.format(since="xact_start")} FROM pg_stat_activity a
    WHERE a.pid <> pg_backend_pid() AND a.pid IN (
        SELECT pid FROM pg_locks WHERE granted AND locktype = 'relation' AND relation = 'onceward_dedup'::regclass)
    ORDER BY a.xact_start LIMIT 1
"""
_HOLDER = f"""
    SELECT {_WHO.format(since="query_start")} FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.classid::bigint = {{high}} AND l.objid::bigint = {{low}}
        AND l.objsubid = 1 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
