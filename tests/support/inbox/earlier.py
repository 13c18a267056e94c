"""The tables of version 4, as they were before an event was identified by its id alone, and rows for them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from onceward.inbox.stores import partitions
from onceward.storage import migrations

DEDUP = ("event_day", "consumer_id", "tracking_id", "payload_sha256", "processed_at", "outcome")
LEDGERS = (
    "onceward_attempts",
    "onceward_effects",
    "onceward_parked",
    "onceward_holds",
    "onceward_dead_letters",
)


def make_tables(connection: Connection) -> None:
    dialect = connection.dialect.name
    connection.exec_driver_sql(migrations.CREATE_TABLE)
    for each in migrations.migrations(dialect)[:4]:
        for statement in migrations.statements(each.up):
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(
            f"INSERT INTO {migrations.TABLE} VALUES ({each.version}, '{each.name}', CURRENT_TIMESTAMP)"
        )


def make_days(connection: Connection, *days: int) -> None:
    """On a connection that begins no transaction."""
    if connection.dialect.name == "postgresql":
        for day in days:
            partitions.make(connection, day)


def insert(connection: Connection, table: str, **values: Any) -> None:
    if "processed_at" in values and connection.dialect.name == "postgresql":
        shown = {name: f":{name}" for name in values} | {"processed_at": "to_timestamp(:processed_at)"}
    else:
        shown = {name: f":{name}" for name in values}
    connection.execute(
        text(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(shown.values())})"), values
    )


def everything(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows. Where PostgreSQL keeps a dedup row does not matter."""
    postgresql = connection.dialect.name == "postgresql"
    columns = ", ".join(DEDUP)
    dedup = f"SELECT {columns} FROM onceward_dedup"
    if postgresql:
        dedup += f" UNION ALL SELECT {columns} FROM onceward_kept"
    queries = {"onceward_dedup": dedup} | {table: f"SELECT * FROM {table}" for table in LEDGERS}
    return {
        table: sorted(
            (tuple(_plain(each) for each in row) for row in connection.execute(text(query))), key=repr
        )
        for table, query in queries.items()
    }


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value
