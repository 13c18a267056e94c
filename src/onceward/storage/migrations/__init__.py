"""The inbox's tables, as plain SQL: `NNNN_name.up.sql` and the way back in `NNNN_name.down.sql`, for each database."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import NamedTuple, Protocol

from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError

TABLE = "onceward_migrations"
CREATE_TABLE = f"""
    CREATE TABLE IF NOT EXISTS {TABLE} (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TEXT NOT NULL)
"""


class Migratable(Protocol):
    """The store whose tables these are."""

    name: str
    """The dialect, and the folder of its migrations."""

    def lock_migrations(self, transaction: DbTransaction) -> None: ...
    def tables(self, transaction: DbTransaction) -> set[str]: ...


class Migration(NamedTuple):
    version: int
    name: str
    up: str
    down: str


def migrations(dialect: str) -> list[Migration]:
    """All there are for a database, oldest first."""
    folder = files(__package__) / dialect
    ups = sorted(each.name for each in folder.iterdir() if each.name.endswith(".up.sql"))
    found = []
    for up in ups:
        version, _, name = up.removesuffix(".up.sql").partition("_")
        down = folder / up.replace(".up.", ".down.")
        found.append(Migration(int(version), name, (folder / up).read_text(), down.read_text()))
    return found


def as_script(dialect: str) -> str:
    """All of them, to read or to run by hand, with the note that each has been applied."""
    applied = [
        f"-- {each.version:04} {each.name}\n{each.up.rstrip()}\n\n{_note(each)};\n"
        for each in migrations(dialect)
    ]
    return "\n".join([f"{CREATE_TABLE.strip()};\n", *applied])


def _note(migration: Migration) -> str:
    return (
        f"INSERT INTO {TABLE} (version, name, applied_at) "
        f"VALUES ({migration.version}, '{migration.name}', CURRENT_TIMESTAMP)"
    )


def apply(transaction: DbTransaction, store: Migratable) -> list[str]:
    """Apply those that are missing, in the order of their numbers. Returns their names."""
    connection = transaction.connection
    store.lock_migrations(transaction)
    connection.exec_driver_sql(CREATE_TABLE)
    there = {row[0] for row in connection.exec_driver_sql(f"SELECT version FROM {TABLE}")}
    applied = []
    for migration in migrations(store.name):
        if migration.version not in there:
            for statement in statements(migration.up):
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql(_note(migration))
            applied.append(f"{migration.version:04} {migration.name}")
    return applied


def revert(transaction: DbTransaction, store: Migratable) -> list[str]:
    """Take all of them back, newest first, with everything in them."""
    connection = transaction.connection
    reverted = []
    for migration in reversed(migrations(store.name)):
        for statement in statements(migration.down):
            connection.exec_driver_sql(statement)
        reverted.append(f"{migration.version:04} {migration.name}")
    connection.exec_driver_sql(f"DROP TABLE {TABLE}")
    return reverted


def check(transaction: DbTransaction, store: Migratable) -> None:
    """Refuses a database that has not all of them."""
    if TABLE not in store.tables(transaction):
        missing = "the tables of the inbox are not there"
    else:
        rows = transaction.connection.exec_driver_sql(f"SELECT version FROM {TABLE}")
        behind = {migration.version for migration in migrations(store.name)} - {row[0] for row in rows}
        if not behind:
            return
        missing = f"migration {', '.join(map(str, sorted(behind)))} of the inbox is missing"
    raise ConfigurationError(
        f"{missing}; call inbox.migrate(), or run `onceward inbox migrate --database URL`"
    )


def statements(script: str) -> list[str]:
    """One by one. A statement ends with a semicolon before an empty line: the body of a trigger has others."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("--")]
    parts = re.split(r";[ \t]*(?:\n[ \t]*\n|\s*\Z)", "\n".join(lines))
    return [part.strip() for part in parts if part.strip()]
