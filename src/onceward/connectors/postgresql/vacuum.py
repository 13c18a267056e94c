"""Vacuums the tables of queues when dead rows pile up.

Autovacuum looks once a minute by default. In a minute a million messages can pass through a queue, and the table would
grow by all of them, although it is empty most of the time. So connectors that take messages look, too.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from onceward._text import driver_message
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from sqlalchemy import Connection

_log = OwnLogger(logging.getLogger("onceward.connectors.postgresql"))

PILE, SHARE = 10_000, 0.2
"""So many dead rows are left, and this part of those that are alive: a vacuum of a large backlog takes long."""
SELDOM = 50
"""Times as long as a vacuum took, none follows: an old transaction keeps it from removing anything."""
PILES = """
    SELECT c.oid::regclass::text FROM pg_class c
    WHERE c.relnamespace = '{s}'::regnamespace AND c.relkind = 'r'
        AND c.relname IN (
            'onceward_queue_messages', 'onceward_queue_delayed', 'onceward_queue_log', 'onceward_queue_turns'
        )
        AND pg_has_role(c.relowner, 'USAGE')
        AND pg_stat_get_dead_tuples(c.oid) > %s + %s * pg_stat_get_live_tuples(c.oid)
"""
"""Those whose owner this role is. Others it may not vacuum."""
VACUUM = "VACUUM (SKIP_LOCKED, TRUNCATE false) {table}"
"""Waits for nobody, and nobody waits for it. Another vacuum of the same table goes on alone."""


class QueueVacuum:
    """Vacuums of one connector."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def run_if_due(self, connection: Connection, schema: str) -> None:
        """Vacuum what needs it, on a connection that commits by itself. An error is logged: autovacuum remains."""
        began = time.monotonic()
        if began < self._next_at:
            return
        try:
            piled = connection.exec_driver_sql(PILES.format(s=schema), (PILE, SHARE))
            for table in piled.scalars().all():
                connection.exec_driver_sql(VACUUM.format(table=table)).close()
        except DBAPIError as error:
            _log.info(
                "a vacuum of the queue's tables failed, and is left to autovacuum: %s", driver_message(error)
            )
        now = time.monotonic()
        self._next_at = now + SELDOM * (now - began)
