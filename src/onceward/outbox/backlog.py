"""How many messages wait in the outbox, for `/metrics` and the console. A run asks, whether or not it relays."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, inspect

from onceward.outbox import statements as sql
from onceward.storage.database import Sql


class OutboxBacklog(NamedTuple):
    waiting: int
    """Messages that are due and not published."""
    age: float
    """Seconds that the oldest of them has waited."""


def outbox_backlog(connection: Connection) -> OutboxBacklog | None:
    """Count, in the connection's transaction. None if the database has no outbox yet."""
    if not inspect(connection).has_table("onceward_outbox"):
        return None
    dialect = connection.dialect.name
    if dialect == "postgresql":
        connection.exec_driver_sql(sql.BY_INDEX_POSTGRESQL)
    found = Sql(dialect).on(connection, sql.BACKLOG).one()
    return OutboxBacklog(int(found.waiting), max(float(found.age or 0.0), 0.0))
