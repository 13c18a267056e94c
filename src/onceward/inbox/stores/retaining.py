"""How long rows stay: horizons, holds, and the steps of a purge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from onceward.db.transaction import DbTransaction
from onceward.inbox.stores.rows import Overtaken, Records, Step
from onceward.storage.sql import Sql


class Retaining(Sql, ABC):
    """The part of a store that a purge and its operators use."""

    name: str
    """The dialect, as SQLAlchemy and the folder of migrations call it."""

    records = "onceward_dedup"
    """All dedup rows there are, as SQL to select from."""
    ledgers: tuple[str, ...] = ("onceward_attempts", "onceward_effects")
    """What else is purged, besides dedup rows: kept by consumer and tracking id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(self.name, clock)

    @abstractmethod
    def freeze_holds(self, connection: Connection) -> None:
        """Until the transaction ends, nobody places a hold or changes the registry. What was placed before is seen."""

    def today(self, transaction: DbTransaction) -> int:
        """Days since 1970, in UTC."""
        return int(self.run(transaction, "SELECT {now}").scalar_one()) // 86400

    def raise_horizon(self, transaction: DbTransaction, consumer_id: str, floor_day: int) -> None:
        """Never lowers it."""
        self.run(transaction, _RAISE_HORIZON, consumer=consumer_id, floor=floor_day)

    def horizons(self, transaction: DbTransaction) -> dict[str, int]:
        return {row["consumer_id"]: row["floor_day"] for row in self.all(transaction, _HORIZONS)}

    def hold(
        self, transaction: DbTransaction, consumer_id: str, tracking_id: str, reason: str, operator: str
    ) -> bool:
        """Keep from purges. False: it was held already."""
        values = {"consumer": consumer_id, "tracking": tracking_id, "reason": reason, "operator": operator}
        return int(self.run(transaction, _HOLD, **values).rowcount) == 1

    def release(self, transaction: DbTransaction, consumer_id: str, tracking_id: str) -> bool:
        return int(self.run(transaction, _RELEASE, consumer=consumer_id, tracking=tracking_id).rowcount) == 1

    def holds(self, transaction: DbTransaction) -> list[dict[str, Any]]:
        return self.all(transaction, _HOLDS)

    def stats(self, transaction: DbTransaction) -> list[dict[str, Any]]:
        """What there is for each consumer: registered, or with dedup rows that nobody will purge."""
        rows = self.all(transaction, _STATS.replace("{records}", self.records))
        return [{**row, "registered": bool(row["registered"])} for row in rows]

    def purge_step(self, connection: Connection, records: Records, after: str, size: int) -> Step:
        """Look at the next rows of a stretch, `size` at most, and remove those below the floor that nobody holds.

        In the caller's transaction. Holds and the registry are looked at again in each step, so that a hold that
        was placed while a purge runs counts from then on.
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
            return Step(0, None)
        remove = _PURGE.format(table=records.table, stretch=stretch, goes=goes)
        rows = int(self.on(connection, remove, upto=upto, **values).rowcount)
        return Step(rows, upto if seen == size else None)

    def may_purge(self, connection: Connection, consumer_id: str, contract: str) -> bool:
        """Whether the contract is still the registered one, and the consumer not on hold as a whole."""
        return self.on(connection, _MAY_PURGE, consumer=consumer_id, contract=contract).first() is not None


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
# Each counted once for all consumers: a count for each of them would go through the whole table each time.
_STATS = """
    WITH records AS (
        SELECT consumer_id, count(*) AS dedup_rows, min(event_day) AS oldest_day
        FROM {records} AS r GROUP BY consumer_id
    )
    SELECT c.consumer_id,
        EXISTS (SELECT 1 FROM onceward_consumers o WHERE o.consumer_id = c.consumer_id) AS registered,
        coalesce(r.dedup_rows, 0) AS dedup_rows,
        r.oldest_day,
        (SELECT count(*) FROM onceward_attempts a WHERE a.consumer_id = c.consumer_id AND a.starts > a.ends
            AND NOT EXISTS (SELECT 1 FROM onceward_dedup d WHERE d.consumer_id = a.consumer_id
                AND d.tracking_id = a.tracking_id AND d.event_day = a.event_day)) AS unended,
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
    "onceward_attempts": ("consumer_id = :consumer", "(locked_until IS NULL OR locked_until <= {now})"),
    # One in doubt stays until somebody has found out what became of it.
    "onceward_effects": ("consumer_id = :consumer", "state = 'done'"),
}
"""Of each table: a stretch that the key finds, and which rows of it may go."""
# From one tracking id to another along the key, so that a step costs what it looks at: neither rows that are held nor
# those that were just removed are looked at again.
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
