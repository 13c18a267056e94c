"""The kit's own databases: a template as the consumer's setup leaves it, and a fresh copy for every run.

Connections are opened in children only.
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
from sqlalchemy.exc import ArgumentError, ProgrammingError

from onceward._secrets import mask_url, remember
from onceward.db.engines import connect_arguments
from onceward.db.poolers import expect_poolers
from onceward.errors import ConfigurationError
from onceward.storage import migrations
from onceward.storage.privileges import is_denied
from onceward.verify.children import PREPARING, run_in_child
from onceward.verify.rows import schema, tables

PATIENCE = 3.0
"""Seconds that a SQLite connection waits for a lock."""


class Databases(ABC):
    """The template and the databases of the runs, on one backend."""

    backend: str

    @abstractmethod
    def prepare(self, build: Callable[[Engine], None]) -> list[schema.Table]:
        """Build the template; return the tables to compare. In a child."""

    @abstractmethod
    def next_url(self) -> URL:
        """The URL of the database for the next run."""

    @abstractmethod
    def renew(self, url: URL) -> None:
        """Make the database at this URL a copy of the template. In a child."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything. In the parent."""

    def isolation(self) -> str:
        """The level of its transactions; empty if there is only one. In a child, when the template is built."""
        return ""

    def learn(self, found: list[schema.Table]) -> None:  # noqa: B027  SQLite has no use for it
        """Take over what `prepare` returned: it ran in a child, this runs in the parent."""

    @property
    def renewing_is_cheap(self) -> bool:
        return True


def databases_of(given: str | Engine | None) -> Databases:
    """Databases on the server that `given` names; raises ConfigurationError if its backend is not supported."""
    if given is None:
        return SqliteFiles()
    if isinstance(given, str):
        remember(given)
    try:
        url = getattr(given, "url", None) or make_url(given)  # type: ignore[arg-type]
    except (ArgumentError, ValueError):  # its text may quote a password
        raise ConfigurationError(
            f"database: {mask_url(str(given))!r} is not a URL; write sqlite:// or postgresql://user@host/name"
        ) from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        return SqliteFiles()
    if backend == "postgresql":
        url = url.set(drivername="postgresql+psycopg")  # for threads and asyncio
        return PostgreSqlDatabases(_with_isolation(url, given))
    raise ConfigurationError(f"database: consumers are verified on sqlite or postgresql, not on {backend!r}")


def _with_isolation(url: URL, given: Any) -> URL:
    """The URL, with the isolation level of the engine that was given instead of one."""
    options = given.get_execution_options() if hasattr(given, "get_execution_options") else {}
    dialect = getattr(given, "dialect", None)
    level = options.get("isolation_level") or getattr(dialect, "_on_connect_isolation_level", None)
    if level is None or level == "AUTOCOMMIT":
        return url
    own = url.query.get("options", "")
    quoted = level.lower().replace("_", " ").replace(" ", "\\ ")
    return url.update_query_dict({"options": f"{own} -c default_transaction_isolation={quoted}".strip()})


def engine_at(url: URL) -> Engine:
    """An engine for threads."""
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": PATIENCE})
        event.listen(engine, "connect", _disable_fsync)
        return engine
    return expect_poolers(create_engine(url, connect_args=connect_arguments(url)))


def async_engine_at(url: URL) -> Any:
    """An engine for asyncio."""
    from sqlalchemy.ext.asyncio import create_async_engine

    if url.get_backend_name() == "sqlite":
        url = url.set(drivername="sqlite+aiosqlite")
        engine = create_async_engine(url, connect_args={**connect_arguments(url), "timeout": PATIENCE})
        event.listen(engine.sync_engine, "connect", _disable_fsync)
        return engine
    return expect_poolers(create_async_engine(url, connect_args=connect_arguments(url, asynchronous=True)))


def preload_driver(url: URL, asynchronous: bool) -> None:
    """Import and read what a connection and an inbox need, without opening one, so children start faster."""
    engine_at(url)
    migrations.migrations(url.get_backend_name())
    if asynchronous:
        async_engine_at(url)
        import onceward.inbox.sessions.session_asyncio  # noqa: F401


def _disable_fsync(connection: Any, _: Any) -> None:
    """Runs take a tenth of the time. A killed process still loses nothing; only a power cut would."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = OFF")
    cursor.close()


class SqliteFiles(Databases):
    """A file for each run, copied from the template."""

    backend = "sqlite"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="onceward-verify-"))
        self._template = self._folder / "template.db"
        self._numbers = count(1)

    def prepare(self, build: Callable[[Engine], None]) -> list[schema.Table]:
        engine = engine_at(self._at(self._template))
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL").close()
        build(engine)
        found = schema.describe(engine)
        engine.dispose()  # closing the last connection checkpoints the log into the one file
        return found

    def next_url(self) -> URL:
        return self._at(self._folder / f"run-{next(self._numbers)}.db")

    def renew(self, url: URL) -> None:
        assert url.database is not None
        for suffix in ("-wal", "-shm"):
            Path(url.database + suffix).unlink(missing_ok=True)
        shutil.copyfile(self._template, url.database)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _at(self, path: Path) -> URL:
        return URL.create("sqlite", database=str(path))


class PostgreSqlDatabases(Databases):
    """Databases on the same server as the given one.

    Copying one takes a quarter of a second. If the setup leaves no rows, there is only one database, which is emptied
    before every run.
    """

    backend = "postgresql"

    def __init__(self, url: URL) -> None:
        self._url = url
        self._name = f"onceward_verify_{uuid4().hex[:12]}"
        self._copy = f"{self._name}_run"
        self._has_rows = False
        self._tables: list[str] = []
        self._places: set[tuple[str, str]] = set()

    def prepare(self, build: Callable[[Engine], None]) -> list[schema.Table]:
        try:
            self._do(f'CREATE DATABASE "{self._name}"')
        except ProgrammingError as error:
            if not is_denied(error):
                raise
            raise ConfigurationError(
                f"the role {self._url.username!r} may not create databases, and the scenarios need their own; "
                "name a server where it may with --run-on URL (or database=…), such as the one of your CI. Where a "
                "consumer runs, nobody needs this right: ship the proof with --out evidence.json"
            ) from None
        engine = self._engine(self._url.set(database=self._name))
        build(engine)
        return schema.describe(engine)

    def learn(self, found: list[schema.Table]) -> None:
        self._has_rows = any(table.has_rows for table in found)
        self._tables = [table.quoted for table in found] + list(tables.OWN)
        self._places = {table.place for table in found}

    def isolation(self) -> str:
        with self._engine(self._url.set(database=self._name)).begin() as connection:
            level: str = connection.exec_driver_sql("SHOW transaction_isolation").scalar_one()
            return level

    @property
    def renewing_is_cheap(self) -> bool:
        return not self._has_rows

    def next_url(self) -> URL:
        return self._url.set(database=self._copy if self._has_rows else self._name)

    def renew(self, url: URL) -> None:
        if self._has_rows:
            self._do(
                f'DROP DATABASE IF EXISTS "{self._copy}" WITH (FORCE)',
                f'CREATE DATABASE "{self._copy}" TEMPLATE "{self._name}"',
            )
            return
        engine = self._engine(url)
        with engine.begin() as connection:
            quote = connection.dialect.identifier_preparer.quote
            for place, name in set(schema.places(connection)) - self._places:  # created by the handler
                connection.exec_driver_sql(f"DROP TABLE IF EXISTS {quote(place)}.{quote(name)} CASCADE")
            checks = ", ".join(f"EXISTS (SELECT 1 FROM {table})" for table in self._tables)
            filled = connection.exec_driver_sql(f"SELECT {checks}").one()
            used = [table for table, is_used in zip(self._tables, filled, strict=True) if is_used]
            if used:
                connection.exec_driver_sql(f"TRUNCATE {', '.join(used)} RESTART IDENTITY CASCADE")

    def close(self) -> None:
        drops = [f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)' for name in (self._copy, self._name)]
        run_in_child(lambda _: self._do(*drops), PREPARING)

    def _engine(self, url: URL, **options: Any) -> Engine:
        made = create_engine(url, poolclass=NullPool, connect_args=connect_arguments(url), **options)
        return expect_poolers(made)

    def _do(self, *statements: str) -> None:
        engine = self._engine(self._url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
