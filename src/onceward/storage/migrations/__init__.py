"""The tables of inbox, dead letters and evidence as plain SQL, in a folder for each database.

`NNNN_name.up.sql` makes a change and `NNNN_name.down.sql` reverts it. A change is a new number in every folder; never
edit a file that a release has applied.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple, Protocol

from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.storage.privileges import writing_our_tables

TABLE = "onceward_migrations"
EARLIEST = 4
"""The way back from here drops tables with all that is in them."""
CREATE_TABLE = f"""
    CREATE TABLE IF NOT EXISTS {TABLE} (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TEXT NOT NULL)
"""


class Migratable(Protocol):
    """The store that uses these tables."""

    name: str
    """The dialect, which is also the folder of its migrations."""

    def lock_migrations(self, transaction: DbTransaction) -> None: ...
    def tables(self, transaction: DbTransaction) -> set[str]: ...


class Migration(NamedTuple):
    version: int
    name: str
    up: str
    down: str


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """Return all migrations of a database, oldest first."""
    folder = files(__package__) / dialect
    ups = sorted(each.name for each in folder.iterdir() if each.name.endswith(".up.sql"))
    found = []
    for up in ups:
        version, _, name = up.removesuffix(".up.sql").partition("_")
        down = folder / up.replace(".up.", ".down.")
        found.append(Migration(int(version), name, (folder / up).read_text(), down.read_text()))
    return tuple(found)


def as_script(dialect: str) -> str:
    """Return all migrations as a script to read or to run by hand; it also records each one as applied."""
    applied = [
        f"-- {each.version:04} {each.name}\n{each.up.rstrip()}\n\n{_insert_version(each)};\n"
        for each in migrations(dialect)
    ]
    return "\n".join([f"{CREATE_TABLE.strip()};\n", *applied])


def apply(transaction: DbTransaction, store: Migratable) -> list[str]:
    """Apply the missing migrations in order. Returns their names."""
    with writing_our_tables():
        return _apply(transaction, store)


def _apply(transaction: DbTransaction, store: Migratable) -> list[str]:
    connection = transaction.connection
    store.lock_migrations(transaction)
    connection.exec_driver_sql(CREATE_TABLE)
    there = {row[0] for row in connection.exec_driver_sql(f"SELECT version FROM {TABLE}")}
    applied = []
    for migration in migrations(store.name):
        if migration.version not in there:
            for statement in statements(migration.up):
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql(_insert_version(migration))
            applied.append(f"{migration.version:04} {migration.name}")
    return applied


def revert(transaction: DbTransaction, store: Migratable, to: int) -> list[str]:
    """Revert the migrations after number `to`, newest first, without losing a record. Returns their names."""
    if to < EARLIEST:
        raise ConfigurationError(
            f"the tables can go back to migration {EARLIEST}, not to {to}: that would delete records"
        )
    connection = transaction.connection
    store.lock_migrations(transaction)
    connection.exec_driver_sql(CREATE_TABLE)
    there = {row[0] for row in connection.exec_driver_sql(f"SELECT version FROM {TABLE}")}
    reverted = []
    for migration in reversed(migrations(store.name)):
        if migration.version in there and migration.version > to:
            for statement in statements(migration.down):
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql(f"DELETE FROM {TABLE} WHERE version = {migration.version}")
            reverted.append(f"{migration.version:04} {migration.name}")
    return reverted


def statements(script: str) -> list[str]:
    """Split a script. A statement ends with a semicolon before an empty line: a trigger's body has other semicolons."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("--")]
    parts = re.split(r";[ \t]*(?:\n[ \t]*\n|\s*\Z)", "\n".join(lines))
    return [part.strip() for part in parts if part.strip()]


def _insert_version(migration: Migration) -> str:
    return (
        f"INSERT INTO {TABLE} (version, name, applied_at) "
        f"VALUES ({migration.version}, '{migration.name}', CURRENT_TIMESTAMP)"
    )
