"""What waits in an app's database: open dead letters, and events that wait for an earlier one of their aggregate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from onceward.inspection.counts_database import has_tables
from onceward.inspection.probes import open_database


class DatabaseBacklog(NamedTuple):
    dead: Mapping[tuple[str, str], int] = {}
    """Open dead letters by consumer and category."""
    parked: Mapping[str, int] = {}
    """Events that wait for an earlier one, by consumer."""
    held_keys: Mapping[str, int] = {}
    """Keys that dead letters hold, by consumer."""


def database_backlog(database: str) -> DatabaseBacklog:
    """Count. Cheap enough for every few seconds; changes nothing. Raises `ServerUnreachable`."""
    with open_database(database) as connection:
        if connection is None or not has_tables(connection):
            return DatabaseBacklog()
        dead = connection.exec_driver_sql(_DEAD).all()
        parked = connection.exec_driver_sql(_PARKED).all()
        held = connection.exec_driver_sql(_HELD).all()
    return DatabaseBacklog(
        {(consumer, category): letters for consumer, category, letters in dead},
        dict(tuple(row) for row in parked),
        dict(tuple(row) for row in held),
    )


_DEAD = """
    SELECT consumer, category, count(*) FROM onceward_dead_letters WHERE status = 'open' GROUP BY consumer, category
"""
_HELD = """
    SELECT consumer, count(DISTINCT order_key) FROM onceward_dead_letters
    WHERE order_key IS NOT NULL AND status IN ('open', 'redriven') GROUP BY consumer
"""
_PARKED = "SELECT consumer_id, count(*) FROM onceward_parked GROUP BY consumer_id"
