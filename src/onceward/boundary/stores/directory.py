"""The directory of an embedded store: its lock, and the SQLite file with its schema."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onceward._files.private import create_file, make_directory
from onceward.errors import ConfigurationError

SCHEMA_VERSION = 3
TRUSTED = "CREATE TABLE trusted (one INTEGER PRIMARY KEY CHECK (one = 1), moment TEXT NOT NULL)"
HOLES = (
    "ALTER TABLE removed ADD steps INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE cursors ADD after_step INTEGER NOT NULL DEFAULT 0",
    'CREATE TABLE holes ("last" INTEGER PRIMARY KEY, "first" INTEGER NOT NULL, step INTEGER NOT NULL)',
)
"""Which step of removing left each hole, and the last step before each name."""
SCHEMA = (
    """
    CREATE TABLE facts (
        "offset" INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL UNIQUE,
        digest BLOB NOT NULL,
        record BLOB NOT NULL,
        stream TEXT NOT NULL,
        appended_at INTEGER NOT NULL
    )
    """,
    "CREATE INDEX facts_by_age ON facts (stream, appended_at)",
    "CREATE TABLE removed (through INTEGER NOT NULL)",
    "INSERT INTO removed VALUES (0)",
    "CREATE TABLE cursors (name TEXT PRIMARY KEY, position INTEGER NOT NULL, confirmed_at INTEGER) WITHOUT ROWID",
    TRUSTED,
    *HOLES,
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
UPGRADES = {1: (TRUSTED, "PRAGMA user_version = 2"), 2: (*HOLES, "PRAGMA user_version = 3")}
"""From each version to the next."""


def prepare(directory: Path) -> Path:
    try:
        make_directory(directory)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot create the data directory {directory}: {error}") from error
    return directory.absolute()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other servers out of the directory: two of them would assign the same offsets twice."""
    try:
        create_file(directory / "lock")
        lock = (directory / "lock").open("a")
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be used as a data directory: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another process, such as a server, uses {directory}: stop it, or use another directory"
            ) from None
        yield


def connect(path: Path) -> sqlite3.Connection:
    create_file(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        _migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("COMMIT")
    elif version < SCHEMA_VERSION:
        connection.execute("BEGIN IMMEDIATE")
        for older in range(version, SCHEMA_VERSION):
            for statement in UPGRADES[older]:
                connection.execute(statement)
        connection.execute("COMMIT")
    elif version > SCHEMA_VERSION:
        raise ConfigurationError(
            f"{path} was written by a newer onceward (schema {version}, this one supports {SCHEMA_VERSION}); upgrade "
            "this one"
        )
