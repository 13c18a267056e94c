"""The days of a PostgreSQL inbox: tables that are attached to `onceward_dedup`, and taken off it again.

    ── make ──► ATTACHED ── detach ──► DETACHING ── detach ──► DETACHED ── drop ──►
                   ▲                                               │
                   └────────────────────── make ◄──────────────────┘

Nobody waits for any of this: a table is attached and detached under locks that reading and writing rows do not heed.
A crash leaves a table in one of these states, and whoever comes next goes on from there.
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

LOCK_WAIT: float = 2.0
"""Seconds that a purge waits for a lock. More than deadlock_timeout, after which an autovacuum in the way gives up."""
SNAPSHOT_WAIT: float = 60.0
"""Seconds that a purge waits for statements that began before the horizon was raised. Nobody waits for it meanwhile."""

READ_COMMITTED: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"
"""Whatever the engine's own: what was committed before a lock was got must be seen after it."""


class PurgeInProgressError(OncewardError):
    """Another process is purging this database. One at a time is enough."""


class Blocked(Exception):
    """Something else is in the way of a purge, for longer than it waits."""


class State(StrEnum):
    ATTACHED = "attached"
    DETACHING = "detaching"
    """Begun: rows of the day are seen no more and cannot be written, but the table is not free yet."""
    DETACHED = "detached"


class Partition(NamedTuple):
    name: str
    day: int
    state: State


class Dropped(NamedTuple):
    rows: int
    kept: int
    """Of these, those that are on hold and were copied."""
    seconds: float


def partitions(connection: Connection) -> list[Partition]:
    """All there are, the oldest first; also those that an interrupted purge has left behind."""
    found = []
    for name, digits, is_attached, is_pending in connection.exec_driver_sql(_PARTITIONS):
        if re.fullmatch(r"\d{8}", digits):
            day = (date.fromisoformat(digits) - date(1970, 1, 1)).days
            state = State.DETACHING if is_pending else State.ATTACHED if is_attached else State.DETACHED
            found.append(Partition(name, day, state))
    return sorted(found, key=lambda each: each.day)


def partition_of(day: int) -> str:
    return f"onceward_dedup_{as_date(day)}".replace("-", "")


def make(connection: Connection, day: int) -> None:
    """As a table of its own that is then attached: CREATE … PARTITION OF would wait for every open transaction, and
    everybody else for it. A table that a purge has detached but not dropped is attached again, with what is in it."""
    name = partition_of(day)
    with begun(connection, READ_COMMITTED):
        _maintain(connection)
        state = _state(connection, day)
        if state is State.ATTACHED:
            return
        if state is State.DETACHING:
            raise Busy(f"the partition {name} is being removed", delay=LATER.delay())
        if state is None:
            connection.exec_driver_sql(f"CREATE TABLE {name} (LIKE onceward_dedup INCLUDING ALL)")
            connection.exec_driver_sql(
                f"ALTER TABLE {name} ADD CONSTRAINT {name}_day CHECK (event_day >= {day} AND event_day < {day + 1})"
            )
        _attach(connection, name, day)


def consumers_in(connection: Connection, partition: Partition) -> set[str]:
    """Whose rows it has. From one consumer to the next through the index, however many rows there are."""
    rows = connection.exec_driver_sql(_CONSUMERS_IN.format(table=partition.name))
    return set(rows.scalars())


def keep_held(connection: Connection, partition: Partition) -> int:
    """Copy single rows that are on hold to where they are found without their partition."""
    return int(connection.exec_driver_sql(_KEEP_HELD.format(table=partition.name)).rowcount)


def detach(connection: Connection, partition: Partition) -> None:
    """Take it off, without anybody waiting for it. Raises `Blocked` if it has to wait too long itself; what was
    begun is then left as it is, for the next purge."""
    if partition.state is State.ATTACHED:
        try:
            connection.exec_driver_sql(
                f"ALTER TABLE onceward_dedup DETACH PARTITION {partition.name} CONCURRENTLY"
            )
            return
        except DBAPIError as error:
            if not _is_lock_timeout(connection, error):
                raise
        # It waited for every transaction that has used the inbox. To finish, those with an old snapshot will do.
        partition = partition._replace(state=_state(connection, partition.day) or State.ATTACHED)
    if partition.state is State.DETACHING:
        with or_blocked(connection, f"{partition.name} is not detached yet"):
            connection.exec_driver_sql(
                f"ALTER TABLE onceward_dedup DETACH PARTITION {partition.name} FINALIZE"
            )
    elif partition.state is State.ATTACHED:
        raise Blocked(f"{partition.name} could not be detached: {in_the_way(connection)}")


def drop(
    connection: Connection,
    partition: Partition,
    freeze_holds: Callable[[Connection], None],
    is_needed: Callable[[Partition], bool],
) -> Dropped | None:
    """Drop a detached table, once held rows are copied. None: somebody needs it after all, and it is attached again.

    Nobody can write to it any more, so what is looked at here is final.
    """
    rows = int(connection.exec_driver_sql(f"SELECT count(*) FROM {partition.name}").scalar_one())
    began = time.perf_counter()
    with or_blocked(connection, f"{partition.name} is not dropped yet"), begun(connection, READ_COMMITTED):
        _maintain(connection)
        if _state(connection, partition.day) is not State.DETACHED:
            return None
        freeze_holds(connection)
        if is_needed(partition):
            _attach(connection, partition.name, partition.day)
            return None
        keep_held(connection, partition)
        kept = int(connection.exec_driver_sql(_COUNT_HELD.format(table=partition.name)).scalar_one())
        connection.exec_driver_sql(f"DROP TABLE {partition.name}")
    return Dropped(rows, kept, time.perf_counter() - began)


@contextmanager
def only_purger(connection: Connection) -> Iterator[None]:
    """One at a time. The lock is the connection's, so it goes with the process."""
    oid = connection.exec_driver_sql("SELECT 'onceward_dedup'::regclass::oid::bigint").scalar_one()
    lock = key_of(f"{PURGE} {oid}")
    if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({lock})").scalar_one():
        raise PurgeInProgressError(
            f"another purge is running: {_holder(connection, lock)}; wait for its end, then run this one again"
        )
    try:
        connection.exec_driver_sql(f"SET lock_timeout = {int(LOCK_WAIT * 1000)}")
        yield
        connection.exec_driver_sql("RESET lock_timeout")
        connection.exec_driver_sql(f"SELECT pg_advisory_unlock({lock})")
    except BaseException:
        connection.invalidate()  # the lock must not go back to the pool with the connection
        raise


def await_old_snapshots(connection: Connection) -> None:
    """Wait until no statement goes on that may not see the horizon that was just raised.

    Such a statement would let an event in whose record is removed meanwhile. One statement takes a moment; under
    REPEATABLE READ it is the whole transaction. Sessions of other roles are seen with `pg_read_all_stats` only.
    """
    until = time.monotonic() + SNAPSHOT_WAIT
    old = _snapshots(connection)
    while old := {each: who for each, who in _snapshots(connection).items() if each in old}:
        if time.monotonic() > until:
            raise Blocked(
                "nothing was removed: a transaction does not see the raised horizon yet "
                f"({'; '.join(old.values())})"
            )
        connection.exec_driver_sql("SELECT pg_sleep(0.01)")


def in_the_way(connection: Connection) -> str:
    """Who has used the inbox in a transaction that is still open, the oldest."""
    who = connection.exec_driver_sql(_IN_THE_WAY).scalar()
    return "a lock was not free in time" if who is None else f"it waits for {who}"


def _maintain(connection: Connection) -> None:
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({key_of(MAINTENANCE)})")


def _attach(connection: Connection, name: str, day: int) -> None:
    connection.exec_driver_sql(
        f"ALTER TABLE onceward_dedup ATTACH PARTITION {name} FOR VALUES FROM ({day}) TO ({day + 1})"
    )


def _state(connection: Connection, day: int) -> State | None:
    return next((each.state for each in partitions(connection) if each.day == day), None)


def _snapshots(connection: Connection) -> dict[tuple[object, ...], str]:
    rows = connection.exec_driver_sql(_SNAPSHOTS)
    return {(pid, began, xmin): who for pid, began, xmin, who in rows}


def _holder(connection: Connection, lock: int) -> str:
    high, low = (lock >> 32) & 0xFFFFFFFF, lock & 0xFFFFFFFF
    found = connection.exec_driver_sql(_HOLDER.format(high=high, low=low)).scalar()
    return "by somebody who has ended by now" if found is None else str(found)


@contextmanager
def or_blocked(connection: Connection, problem: str) -> Iterator[None]:
    """A lock that was not free in time is `Blocked`."""
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
