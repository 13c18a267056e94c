"""Databases of the kit's own: one as the consumer's set-up leaves it, and fresh ones like it for every run.

Only children call what opens a connection.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import URL, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from onceward.errors import ConfigurationError
from onceward.verify import tables

PATIENCE = 3.0
"""Seconds that a SQLite connection waits for another one's lock."""


class Databases(ABC):
    backend: str

    @abstractmethod
    def prepare(self, build: Callable[[Engine], None]) -> list[tables.Table]:
        """Make the template; returns what is to be compared. In a child."""

    @abstractmethod
    def place(self) -> URL:
        """Where the next run may have its database."""

    @abstractmethod
    def renew(self, place: URL) -> None:
        """Make the database there like the template. In a child."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything. In a child, except for what needs no connection."""

    def know(self, found: list[tables.Table]) -> None:  # noqa: B027  most need not know
        """What `prepare` found out, for those that were not in its child."""

    @property
    def renewing_is_cheap(self) -> bool:
        return True


def databases_of(given: str | Engine | None) -> Databases:
    if given is None:
        return SqliteFiles()
    try:
        url = getattr(given, "url", None) or make_url(given)  # type: ignore[arg-type]
    except ArgumentError as error:
        raise ConfigurationError(f"database: {error}") from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        return SqliteFiles()
    if backend == "postgresql":
        return PostgreSqlDatabases(_synchronous(url))
    raise ConfigurationError(f"consumers are verified on sqlite and postgresql, not on {backend!r}")


def engine_at(place: URL) -> Engine:
    """For threads."""
    if place.get_backend_name() == "sqlite":
        engine = create_engine(place, connect_args={"timeout": PATIENCE})
        event.listen(engine, "connect", _unsafe)
        return engine
    return create_engine(place)


def async_engine_at(place: URL) -> Any:
    from sqlalchemy.ext.asyncio import create_async_engine

    if place.get_backend_name() == "sqlite":
        engine = create_async_engine(
            place.set(drivername="sqlite+aiosqlite"), connect_args={"timeout": PATIENCE}
        )
        event.listen(engine.sync_engine, "connect", _unsafe)
        return engine
    return create_async_engine(place)


def preload(place: URL, asynchronous: bool) -> None:
    """Import what a connection needs, without opening one: children start faster that way."""
    engine_at(place)
    if asynchronous:
        async_engine_at(place)
        import onceward.inbox.sessions.session_asyncio  # noqa: F401


def _unsafe(connection: Any, _: Any) -> None:
    """A killed process loses nothing by this, only a power cut would; and runs take a tenth of the time."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = OFF")
    cursor.close()


def _synchronous(url: URL) -> URL:
    """psycopg speaks both ways; other drivers are asked to step aside."""
    return url.set(drivername="postgresql+psycopg")


class SqliteFiles(Databases):
    """A file for each run, copied from the template."""

    backend = "sqlite"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="onceward-verify-"))
        self._template = self._folder / "template.db"
        self._numbers = count(1)

    def prepare(self, build: Callable[[Engine], None]) -> list[tables.Table]:
        engine = engine_at(self._at(self._template))
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL").close()
        build(engine)
        found = tables.describe(engine)
        engine.dispose()  # the last connection to leave puts everything into the one file
        return found

    def place(self) -> URL:
        return self._at(self._folder / f"run-{next(self._numbers)}.db")

    def renew(self, place: URL) -> None:
        assert place.database is not None
        for rest in ("-wal", "-shm"):
            Path(place.database + rest).unlink(missing_ok=True)
        shutil.copyfile(self._template, place.database)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _at(self, path: Path) -> URL:
        return URL.create("sqlite", database=str(path))


class PostgreSqlDatabases(Databases):
    """Databases beside the one that was named, on its server.

    Copying one takes a quarter of a second, so a set-up that leaves tables without rows has only one, which is emptied
    for every run.
    """

    backend = "postgresql"

    def __init__(self, url: URL) -> None:
        self._url = url
        self._name = f"onceward_verify_{uuid4().hex[:12]}"
        self._copy = f"{self._name}_run"
        self._has_rows = False
        self._tables: list[str] = []

    def prepare(self, build: Callable[[Engine], None]) -> list[tables.Table]:
        self._do(f'CREATE DATABASE "{self._name}"')
        engine = create_engine(self._url.set(database=self._name), poolclass=NullPool)
        build(engine)
        return tables.describe(engine)

    def know(self, found: list[tables.Table]) -> None:
        self._has_rows = any(table.has_rows for table in found)
        self._tables = [table.quoted for table in found] + list(tables.OWN)

    @property
    def renewing_is_cheap(self) -> bool:
        return not self._has_rows

    def place(self) -> URL:
        return self._url.set(database=self._copy if self._has_rows else self._name)

    def renew(self, place: URL) -> None:
        if self._has_rows:
            self._do(
                f'DROP DATABASE IF EXISTS "{self._copy}" WITH (FORCE)',
                f'CREATE DATABASE "{self._copy}" TEMPLATE "{self._name}"',
            )
            return
        engine = create_engine(place, poolclass=NullPool)
        with engine.begin() as connection:
            seen = ", ".join(f"EXISTS (SELECT 1 FROM {table})" for table in self._tables)
            filled = connection.exec_driver_sql(f"SELECT {seen}").one()
            used = [table for table, is_used in zip(self._tables, filled, strict=True) if is_used]
            if used:
                connection.exec_driver_sql(f"TRUNCATE {', '.join(used)} RESTART IDENTITY CASCADE")

    def close(self) -> None:
        self._do(*(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)' for name in (self._copy, self._name)))

    def _do(self, *statements: str) -> None:
        engine = create_engine(self._url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
