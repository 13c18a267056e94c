"""Whether a connection of the application can remove messages of a queue: then that is part of its transactions."""

from __future__ import annotations

import logging

from sqlalchemy import Connection, text

from onceward.connectors.postgresql.schema import IDENTITY, QueueTables
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.connectors.postgresql"))

_SEES = text("SELECT to_regclass(:table) IS NOT NULL")
_MAY = """
    SELECT has_table_privilege(:messages, 'SELECT') AND has_table_privilege(:messages, 'DELETE')
        AND has_table_privilege(:log, 'INSERT')
"""


def is_joint(connection: Connection, tables: QueueTables) -> bool:
    """Ask in a transaction of the application. If the database is the same and it cannot be done, log why."""
    if connection.dialect.name != "postgresql":
        return False
    schema = tables.schema
    if not connection.execute(_SEES, {"table": f"{schema}.onceward_queue_schema"}).scalar_one():
        return False
    database = tuple(connection.execute(text(f"SELECT {IDENTITY} FROM {schema}.onceward_queue_schema")).one())
    if database != tables.database:
        return False
    names = {"messages": f"{schema}.onceward_queue_messages", "log": f"{schema}.onceward_queue_log"}
    if not connection.execute(text(_MAY), names).scalar_one():
        return _refuse(
            "its role may not remove messages; grant it SELECT and DELETE on onceward_queue_messages and INSERT on "
            "onceward_queue_log"
        )
    isolation = connection.execute(text("SHOW transaction_isolation")).scalar_one()
    if isolation != "read committed":
        return _refuse(
            f"its transactions are {isolation}, and would collide with every extension of a lease; use READ COMMITTED"
        )
    return True


def _refuse(why: str) -> bool:
    _log.warning(
        "the queue is in the application's database, but acknowledging a message is a commit of its own: %s",
        why,
    )
    return False
