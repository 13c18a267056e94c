"""Reads a store while its server has it open, for operators. Changes nothing.

PostgreSQL and NATS are open to many clients. The embedded store belongs to one server, but SQLite lets others read
what is committed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Protocol

from onceward.boundary.store import Bounds, Objects
from onceward.boundary.stores import check_exists, directory_of, open_store, sqlite
from onceward.boundary.stores.files import FileObjects
from onceward.boundary.wire import Record
from onceward.errors import ConfigurationError

ROWS = 100
"""Read from SQLite at once: at most this many megabytes."""


class StoreReader(Protocol):
    """The read-only part of a `BoundaryStore`."""

    @property
    def objects(self) -> Objects: ...
    async def read(self, after: int, limit: int) -> list[Record]: ...
    async def bounds(self) -> Bounds: ...
    async def position(self, name: str, *, create: bool) -> int | None: ...


@asynccontextmanager
async def open_reader(url: str) -> AsyncIterator[StoreReader]:
    """Open a directory (or sqlite:///directory), postgresql://… or nats://… for reading."""
    check_exists(url)
    directory = directory_of(url)
    if directory is None:
        store = await open_store(url)
        try:
            yield store
        finally:
            await store.close()
        return
    with closing(_connect(directory / "boundary.db")) as connection:
        yield SqliteStoreReader(connection, FileObjects(directory / "objects", read_only=True))


class SqliteStoreReader:
    def __init__(self, connection: sqlite3.Connection, objects: FileObjects) -> None:
        self._connection = connection
        self.objects = objects

    async def read(self, after: int, limit: int) -> list[Record]:
        with sqlite.readable():
            return self._connection.execute(sqlite.READ, (after, min(limit, ROWS))).fetchall()

    async def bounds(self) -> Bounds:
        with sqlite.readable():
            return sqlite.bounds_of(self._connection)

    async def position(self, name: str, *, create: bool) -> int | None:
        with sqlite.readable():
            row = self._connection.execute(sqlite.POSITION, (name,)).fetchone()
        return int(row[0]) if row else None


def _connect(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=10.0)
    except sqlite3.Error as error:
        raise ConfigurationError(f"{path} cannot be opened: {error}") from error
    connection.execute("PRAGMA query_only = ON")
    return connection
