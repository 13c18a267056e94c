"""Small SQLite files that several processes write to, one of which may be killed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

PATIENCE = 10.0
"""Seconds to wait for other writers."""


def create(path: Path, schema: str) -> None:
    """Make the file with these tables."""
    with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(schema)


def reader(path: Path) -> sqlite3.Connection:
    """For looking only: it waits for no writer, and no writer for it."""
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    # The first read takes a place among the file's users, and keeps it. Without one, every writer would be
    # the last to leave, and would lock the whole file to tidy it up.
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return connection


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """One transaction: all of it or nothing, even if the process is killed inside.

    Each has its own connection, so an attempt that is interrupted anywhere leaves no half-open transaction
    behind for the next. What is committed survives the process; `synchronous = FULL` would have it survive a
    power cut too, at the price of a disk flush for every order.
    """
    with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            yield connection
