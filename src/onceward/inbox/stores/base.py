"""The rows of an inbox, and the SQL that all databases share.

Every method takes the caller's transaction, or connection, as its first argument, so the same code serves threads and
asyncio. See `onceward.storage.database` for `{now}` in a statement.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from onceward.db.operations import OneStatement, run_by_sqlalchemy
from onceward.db.transaction import DbTransaction
from onceward.inbox.event import Digest
from onceward.inbox.stores.effects import EffectRows
from onceward.inbox.stores.types import Attempts, Found, Key, Overtaken, PurgeStep, Records
from onceward.storage.database import Sql

T = TypeVar("T")


class RetentionStore(Sql, ABC):
    """The part of a store that a purge and operators use."""

    name: str
    """The dialect, which is also the folder of its migrations."""

    records = "onceward_dedup"
    """All dedup rows, as SQL to select from."""
    ledgers: tuple[str, ...] = (
        "onceward_attempts",
        "onceward_effects",
        "onceward_spellings",
        "onceward_copies",
    )
    """Other tables to purge, keyed by consumer and tracking id."""
    oldest_ahead: str
    """SQL: the places of the next dedup rows that are old enough to go, oldest first."""
    purge_oldest: str
    """SQL: remove those of them that are not on hold."""
    before_all: ClassVar[dict[str, Any]]
    """A place before all others."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        super().__init__(self.name, clock)

    @abstractmethod
    def freeze_holds(self, connection: Connection) -> None:
        """Block changes to holds and the registry until the transaction ends. It sees all earlier ones."""

    def today(self, transaction: DbTransaction) -> int:
        """Return the days since 1970, in UTC."""
        return int(self.run(transaction, "SELECT {now}").scalar_one()) // 86400

    def raise_horizon(self, transaction: DbTransaction, consumer_id: str, floor_day: int) -> None:
        """Raise the horizon; never lowers it."""
        self.run(transaction, _RAISE_HORIZON, consumer=consumer_id, floor=floor_day)

    def horizons(self, transaction: DbTransaction) -> dict[str, int]:
        return {row["consumer_id"]: row["floor_day"] for row in self.all(transaction, _HORIZONS)}

    def hold(
        self, transaction: DbTransaction, consumer_id: str, tracking_id: str, reason: str, operator: str
    ) -> bool:
        """Protect records from purges. Returns False if they were already held."""
        values = {"consumer": consumer_id, "tracking": tracking_id, "reason": reason, "operator": operator}
        return int(self.run(transaction, _HOLD, **values).rowcount) == 1

    def release(self, transaction: DbTransaction, consumer_id: str, tracking_id: str) -> bool:
        return int(self.run(transaction, _RELEASE, consumer=consumer_id, tracking=tracking_id).rowcount) == 1

    def holds(self, transaction: DbTransaction) -> list[dict[str, Any]]:
        return self.all(transaction, _HOLDS)

    def stats(self, transaction: DbTransaction) -> list[dict[str, Any]]:
        """Return counts for each consumer that is registered, or that has dedup rows but is no longer registered."""
        rows = self.all(transaction, _STATS.replace("{records}", self.records))
        return [{**row, "registered": bool(row["registered"])} for row in rows]

    def purge_step(self, connection: Connection, records: Records, after: str, size: int) -> PurgeStep:
        """Check the next rows of a range, at most `size`, and remove those that are below the floor and not on hold.

        Runs in the caller's transaction. Each step reads holds and the registry again, so a hold placed while a purge
        runs takes effect at once. Raises `Overtaken` if the consumer must not be purged anymore.
        """
        self.freeze_holds(connection)
        if not self.may_purge(connection, records.consumer_id, records.contract):
            raise Overtaken(records.consumer_id)
        stretch, goes = _PURGED[records.table]
        values = {
            "consumer": records.consumer_id,
            "day": records.day,
            "floor": records.floor_day,
            "after": after,
            "size": size,
        }
        look = _LOOK_AHEAD.format(table=records.table, stretch=stretch)
        upto, seen = self.on(connection, look, **values).one()
        if seen == 0:
            return PurgeStep(0, None)
        remove = _PURGE.format(table=records.table, stretch=stretch, goes=goes)
        rows = int(self.on(connection, remove, upto=upto, **values).rowcount)
        return PurgeStep(rows, upto if seen == size else None)

    def purge_oldest_step(self, connection: Connection, records: Records, after: Any, size: int) -> PurgeStep:
        """The same for dedup rows in the order of their age.

        A copy may come with another `created_at`, so a row's age begins when the event was done, unless its id contains
        a day. An own time in the future keeps it for longer.
        """
        self.freeze_holds(connection)
        if not self.may_purge(connection, records.consumer_id, records.contract):
            raise Overtaken(records.consumer_id)
        place = after or self.before_all
        values = {"consumer": records.consumer_id, "floor": records.floor_day, "day": records.day, **place}
        ahead = self.on(connection, self.oldest_ahead, size=size, **values).mappings().all()
        if not ahead:
            return PurgeStep(0, None)
        upto = dict(ahead[-1])
        last = {f"last_{name}": value for name, value in upto.items()}
        gone = self.on(connection, self.purge_oldest, **values, **last)
        return PurgeStep(int(gone.rowcount), upto if len(ahead) == size else None)

    def may_purge(self, connection: Connection, consumer_id: str, contract: str) -> bool:
        """Whether the contract is still the registered one, and the consumer as a whole is not on hold."""
        return self.on(connection, _MAY_PURGE, consumer=consumer_id, contract=contract).first() is not None


class Store(EffectRows, RetentionStore):
    """Reads and writes the rows of an inbox."""

    group_size = 100
    """Events that share a commit, at most."""
    groups_at_once = 1
    """How many groups a consumer has at the same time, at most."""
    owner: str | None = None
    """The process that the leases of starts belong to; see `onceward.inbox.stores.owners`."""
    this_event = "consumer_id = :consumer AND tracking_id = :tracking"
    """SQL that finds the dedup row of an event."""
    limit_waiting = ""
    """SQL that limits how long a transaction of the inbox's own waits for a row, and how long each of its statements
    takes, if they could take long: the process that locked the row may be frozen."""
    without_flush = ""
    """The same, and the commit does not wait for the disk either."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        super().__init__(clock)
        self.admit_only = OneStatement(
            self.admission,
            lambda found: found[0] == 1,
            lambda transaction, *event: run_by_sqlalchemy(transaction, *self.admission(*event))[0] == 1,
        )
        """`admit` of a key and a digest, without letters, in one statement. An error has to go through `explain`."""

    def limited(self, operation: Callable[..., T], *, flushes: bool = True) -> Callable[..., T]:
        """Return the operation with `limit_waiting` before it, or `without_flush`."""
        limits = self.limit_waiting if flushes else self.without_flush
        if not limits:
            return operation

        def run(transaction: DbTransaction, *args: Any) -> T:
            self.run(transaction, limits)
            return operation(transaction, *args)

        return run

    # ── what differs between databases ──────────────────────────────────────────────────────────────────

    @abstractmethod
    def admission(self, key: Key, digest: Digest) -> tuple[str, dict[str, Any]]:
        """The statement that writes the dedup row, and nothing else, with its values."""

    def explain(self, error: IntegrityError, key: Key) -> Exception | None:
        """Return what an error of this statement means, if that is something else."""
        return None

    @abstractmethod
    def admit(self, transaction: DbTransaction, key: Key, digest: Digest) -> bool:
        """Write the dedup row, and resolve an open dead letter of the event: this commit does it after all. With
        `admit_only`, the caller does the second with `resolve_letters`, before the commit.

        Returns False if the row was not written; `look_up` says why.

        Never waits for a copy that is in flight elsewhere. Raises `MissingDay` if the day must be prepared first.
        """

    def resolve_letters(
        self, transaction: DbTransaction, consumer_id: str, done: Sequence[tuple[str, Digest]]
    ) -> None:
        """Resolve the open dead letters of these events, by tracking id."""
        values = [{"consumer": consumer_id, "tracking": each, **digest._asdict()} for each, digest in done]
        self.many(transaction, RESOLVE_LETTER, values)

    @abstractmethod
    def lock(self, transaction: DbTransaction, name: str) -> bool:
        """Lock a name until the transaction ends. Returns False at once if another transaction has it."""

    @abstractmethod
    def look_up(self, transaction: DbTransaction, key: Key) -> Found: ...

    def partition(self, key: Key) -> int | None:
        """Return the day whose partition has the row of this event. None if none has to be prepared for it."""
        return None

    def prepare_day(self, connection: Connection, key: Key) -> None:
        """Create the partition of a day, outside any transaction. Does nothing for a day below the horizon."""

    @abstractmethod
    def record_starts(
        self, transaction: DbTransaction, consumer_id: str, events: Sequence[Key], lease: float
    ) -> list[tuple[str, int]]:
        """Count a start for each event that has no start without an end. Returns (tracking id, number of the start)
        for each counted one."""

    @abstractmethod
    def forget_attempts(
        self, transaction: DbTransaction, consumer_id: str, tracking_ids: Sequence[str]
    ) -> None:
        """Delete the attempts of events that are done."""

    @abstractmethod
    def extend_attempts(
        self, transaction: DbTransaction, consumer_id: str, tracking_ids: Sequence[str], lease: float
    ) -> None:
        """Extend the leases of starts that are waiting or running."""

    @abstractmethod
    def lock_migrations(self, transaction: DbTransaction) -> None:
        """Keep other processes from changing the tables until the transaction ends."""

    def check_role(self, transaction: DbTransaction) -> None:
        """Raise ConfigurationError if the role of the connection lacks a right that some later event needs."""

    @abstractmethod
    def tables(self, transaction: DbTransaction) -> set[str]:
        """Return the names of the existing tables."""

    # ── attempts ────────────────────────────────────────────────────────────────────────────────────────

    def start(self, transaction: DbTransaction, key: Key, at_most: int, lease: float) -> Attempts | None:
        """Count one start, with a lease. Returns None if too many have no end, or another lease is active."""
        row = self._one(transaction, _START, key, limit=at_most, lease=lease, owner=self.owner)
        return None if row is None else Attempts(row.starts, row.ends)

    def attempts(self, transaction: DbTransaction, key: Key, *, lock: bool = False) -> Attempts:
        """Return what is counted. With `lock`, no lease begins or is renewed until the transaction ends."""
        row = self._one(transaction, _ATTEMPTS + (self.for_update if lock else ""), key)
        return Attempts(0, 0) if row is None else Attempts(row.starts, row.ends, float(row.locked_for))

    def renew(self, transaction: DbTransaction, key: Key, token: int, lease: float) -> bool:
        """Extend a lease. Returns False if another worker has the event now."""
        return self._execute(transaction, _RENEW, key, token=token, lease=lease) == 1

    def finish(self, transaction: DbTransaction, key: Key, token: int) -> bool:
        """Delete the attempts of a done event. Returns False if the lease was lost: the event must not be committed."""
        return self._execute(transaction, _FINISH, key, token=token) == 1

    # ── sequences ───────────────────────────────────────────────────────────────────────────────────────

    def last_sequence(self, transaction: DbTransaction, key: Key, aggregate_id: str) -> int | None:
        row = self._one(transaction, _LAST_SEQUENCE, key, aggregate=aggregate_id)
        return None if row is None else int(row.last_sequence)

    def advance(self, transaction: DbTransaction, key: Key, aggregate_id: str, sequence: int) -> None:
        self._execute(transaction, _ADVANCE, key, aggregate=aggregate_id, sequence=sequence)
        self._execute(transaction, _UNPARK, key, aggregate=aggregate_id)

    def park(self, transaction: DbTransaction, key: Key, aggregate_id: str, sequence: int) -> float:
        """Record that an event waits, and return for how many seconds it has waited."""
        self._execute(transaction, _PARK, key, aggregate=aggregate_id, sequence=sequence)
        row = self._one(transaction, _PARKED_FOR, key, aggregate=aggregate_id)
        return 0.0 if row is None else float(row.seconds)

    def unpark(self, transaction: DbTransaction, key: Key, aggregate_id: str) -> None:
        self._execute(transaction, _UNPARK, key, aggregate=aggregate_id)

    def mark_superseded(self, transaction: DbTransaction, key: Key) -> None:
        self._execute(transaction, _SUPERSEDED.replace("{this_event}", self.this_event), key)

    # ── the registry ────────────────────────────────────────────────────────────────────────────────────

    def register(self, transaction: DbTransaction, consumer_id: str, contract: Mapping[str, Any]) -> None:
        self.clocks.note(transaction.connection, self.now(transaction))
        self.run(transaction, _REGISTER, consumer=consumer_id, contract=json.dumps(contract, sort_keys=True))

    def touch(self, transaction: DbTransaction, consumer_id: str) -> None:
        """Rewrite an existing row, to test whether the database accepts writes."""
        self.run(transaction, _TOUCH, consumer=consumer_id)

    def unregister(self, transaction: DbTransaction, consumer_id: str) -> bool:
        return int(self.run(transaction, _UNREGISTER, consumer=consumer_id).rowcount) == 1

    def consumers(self, transaction: DbTransaction) -> list[dict[str, Any]]:
        rows = self.registrations(transaction)
        return [{**row, "contract": json.loads(row["contract"])} for row in rows]

    def registrations(self, transaction: DbTransaction) -> list[dict[str, Any]]:
        """Return the same as `consumers`, with each contract as JSON text."""
        return self.all(transaction, _CONSUMERS)


_RAISE_HORIZON = """
    INSERT INTO onceward_horizons (consumer_id, floor_day) VALUES (:consumer, :floor)
    ON CONFLICT (consumer_id) DO UPDATE SET floor_day = excluded.floor_day
    WHERE excluded.floor_day > onceward_horizons.floor_day
"""
_HORIZONS = "SELECT consumer_id, floor_day FROM onceward_horizons"
_HOLD = """
    INSERT INTO onceward_holds (consumer_id, tracking_id, reason, operator, placed_at)
    VALUES (:consumer, :tracking, :reason, :operator, {now}) ON CONFLICT DO NOTHING
"""
_RELEASE = "DELETE FROM onceward_holds WHERE consumer_id = :consumer AND tracking_id = :tracking"
_HOLDS = """
    SELECT consumer_id, tracking_id, reason, operator, placed_at FROM onceward_holds
    ORDER BY consumer_id, tracking_id
"""
# Counts all consumers at once: one count per consumer would scan the whole table each time.
_STATS = """
    WITH records AS (
        SELECT consumer_id, count(*) AS dedup_rows, min(own_day) AS oldest_day
        FROM {records} AS r GROUP BY consumer_id
    )
    SELECT c.consumer_id,
        EXISTS (SELECT 1 FROM onceward_consumers o WHERE o.consumer_id = c.consumer_id) AS registered,
        coalesce(r.dedup_rows, 0) AS dedup_rows,
        r.oldest_day,
        (SELECT count(*) FROM onceward_attempts a WHERE a.consumer_id = c.consumer_id AND a.starts > a.ends
            AND NOT EXISTS (SELECT 1 FROM onceward_dedup d WHERE d.consumer_id = a.consumer_id
                AND d.tracking_id = a.tracking_id)) AS unended,
        (SELECT count(*) FROM onceward_effects e
            WHERE e.consumer_id = c.consumer_id AND e.state = 'intended') AS effects_in_doubt,
        (SELECT count(*) FROM onceward_parked p WHERE p.consumer_id = c.consumer_id) AS parked,
        (SELECT floor_day FROM onceward_horizons h WHERE h.consumer_id = c.consumer_id) AS floor_day,
        (SELECT count(*) FROM onceward_holds h WHERE h.consumer_id = c.consumer_id) AS holds
    FROM (SELECT consumer_id FROM onceward_consumers UNION SELECT consumer_id FROM records) AS c
    LEFT JOIN records r ON r.consumer_id = c.consumer_id
    ORDER BY c.consumer_id
"""

_MAY_PURGE = """
    SELECT 1 FROM onceward_consumers WHERE consumer_id = :consumer AND contract = :contract
        AND NOT EXISTS (SELECT 1 FROM onceward_holds WHERE consumer_id = :consumer AND tracking_id = '')
"""
_PURGED = {
    "onceward_dedup": ("event_day = :day AND consumer_id = :consumer", "true"),
    "onceward_kept": ("consumer_id = :consumer", "true"),
    # A copy with a newer created_at may still run, so recent attempts and effects stay whatever the event's own day is.
    "onceward_attempts": (
        "consumer_id = :consumer",
        "last_at < :floor * 86400.0 AND (locked_until IS NULL OR locked_until <= {steady})",
    ),
    # An effect in doubt stays until an operator has resolved it.
    "onceward_effects": (
        "consumer_id = :consumer",
        "state <> 'intended' AND coalesce(settled_at, intended_at) < :floor * 86400.0",
    ),
    "onceward_spellings": ("consumer_id = :consumer", "true"),
    "onceward_copies": ("consumer_id = :consumer", "true"),
}
"""For each table: the condition of a range along its key, and which of its rows may be removed."""
# Steps go from one tracking id to the next along the key, so no step reads rows on hold or removed rows again.
_LOOK_AHEAD = """
    SELECT max(tracking_id), count(*) FROM (
        SELECT tracking_id FROM {table} WHERE {stretch} AND tracking_id > :after
        ORDER BY tracking_id LIMIT :size) AS ahead
"""
_PURGE = """
    DELETE FROM {table} WHERE {stretch} AND tracking_id > :after AND tracking_id <= :upto
        AND event_day < :floor AND {goes}
        AND NOT EXISTS (SELECT 1 FROM onceward_holds h
            WHERE h.consumer_id = :consumer AND h.tracking_id IN ('', {table}.tracking_id))
"""

_START = """
    INSERT INTO onceward_attempts (consumer_id, tracking_id, event_day, starts, ends, locked_until, last_at, owner)
    VALUES (:consumer, :tracking, :day, 1, 0, {steady} + CAST(:lease AS double precision), {now}, :owner)
    ON CONFLICT (consumer_id, tracking_id) DO UPDATE SET starts = onceward_attempts.starts + 1,
        locked_until = excluded.locked_until, last_at = excluded.last_at, owner = excluded.owner
    WHERE onceward_attempts.starts - onceward_attempts.ends < :limit
        AND (onceward_attempts.locked_until IS NULL OR onceward_attempts.locked_until <= {steady})
    RETURNING starts, ends
"""
_ATTEMPTS = """
    SELECT starts, ends, coalesce(locked_until - {steady}, 0) AS locked_for FROM onceward_attempts
    WHERE consumer_id = :consumer AND tracking_id = :tracking
"""
_RENEW = """
    UPDATE onceward_attempts SET locked_until = {steady} + CAST(:lease AS double precision)
    WHERE consumer_id = :consumer AND tracking_id = :tracking AND starts = :token AND locked_until IS NOT NULL
"""
_FINISH = """
    DELETE FROM onceward_attempts
    WHERE consumer_id = :consumer AND tracking_id = :tracking AND starts = :token AND locked_until IS NOT NULL
"""

RESOLVE_LETTER = """
    UPDATE onceward_dead_letters SET status = 'resolved', settled_at = {now}
    WHERE consumer = :consumer AND tracking_id = :tracking AND status = 'open'
        AND payload_sha256 IN (:content, :payload)
"""

_LAST_SEQUENCE = """
    SELECT last_sequence FROM onceward_sequences WHERE consumer_id = :consumer AND aggregate_id = :aggregate
"""
_ADVANCE = """
    INSERT INTO onceward_sequences (consumer_id, aggregate_id, last_sequence, tracking_id)
    VALUES (:consumer, :aggregate, :sequence, :tracking)
    ON CONFLICT (consumer_id, aggregate_id) DO UPDATE SET
        last_sequence = excluded.last_sequence, tracking_id = excluded.tracking_id
"""
_PARK = """
    INSERT INTO onceward_parked (consumer_id, aggregate_id, tracking_id, sequence, since)
    VALUES (:consumer, :aggregate, :tracking, :sequence, {steady}) ON CONFLICT DO NOTHING
"""
_PARKED_FOR = """
    SELECT {steady} - since AS seconds FROM onceward_parked
    WHERE consumer_id = :consumer AND aggregate_id = :aggregate AND tracking_id = :tracking
"""
_UNPARK = """
    DELETE FROM onceward_parked
    WHERE consumer_id = :consumer AND aggregate_id = :aggregate AND tracking_id = :tracking
"""
_SUPERSEDED = """
    UPDATE onceward_dedup SET outcome = 'superseded'
    WHERE {this_event}
"""

_REGISTER = """
    INSERT INTO onceward_consumers (consumer_id, contract, registered_at, updated_at)
    VALUES (:consumer, :contract, {now}, {now})
    ON CONFLICT (consumer_id) DO UPDATE SET contract = excluded.contract, updated_at = excluded.updated_at
"""
_TOUCH = "UPDATE onceward_consumers SET contract = contract WHERE consumer_id = :consumer"
_UNREGISTER = "DELETE FROM onceward_consumers WHERE consumer_id = :consumer"
_CONSUMERS = (
    "SELECT consumer_id, contract, registered_at, updated_at FROM onceward_consumers ORDER BY consumer_id"
)
