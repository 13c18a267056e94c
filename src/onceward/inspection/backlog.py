"""What waits in an app's database: open dead letters, events that wait for an earlier one of their aggregate, and the
outbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from onceward.inspection.counts_database import has_tables
from onceward.inspection.probes import open_database

if TYPE_CHECKING:
    from onceward.outbox.backlog import OutboxBacklog


class DatabaseBacklog(NamedTuple):
    dead: Mapping[tuple[str, str], int] = {}
    """Open dead letters by consumer and category."""
    parked: Mapping[str, int] = {}
    """Events that wait for an earlier one, by consumer."""
    held_keys: Mapping[str, int] = {}
    """Keys that dead letters hold, by consumer."""
    outbox: OutboxBacklog | None = None
    """None if the database has no outbox yet."""


def database_backlog(database: str) -> DatabaseBacklog:
    """Count. Cheap enough for every few seconds; changes nothing. Raises `ServerUnreachable`."""
    from onceward.outbox.backlog import outbox_backlog

    with open_database(database) as connection:
        if connection is None or not has_tables(connection):
            return DatabaseBacklog()
        dead = connection.exec_driver_sql(_DEAD).all()
        parked = connection.exec_driver_sql(_PARKED).all()
        held = connection.exec_driver_sql(_HELD).all()
        outbox = outbox_backlog(connection)
    return DatabaseBacklog(
        {(consumer, category): letters for consumer, category, letters in dead},
        dict(tuple(row) for row in parked),
        dict(tuple(row) for row in held),
        outbox,
    )


_DEAD = """
    SELECT consumer, category, count(*) FROM onceward_dead_letters WHERE status = 'open' GROUP BY consumer, category
"""
_HELD = """
    SELECT consumer, count(DISTINCT order_key) FROM onceward_dead_letters
    WHERE order_key IS NOT NULL AND status IN ('open', 'redriven') GROUP BY consumer
"""
_PARKED = "SELECT consumer_id, count(*) FROM onceward_parked GROUP BY consumer_id"
