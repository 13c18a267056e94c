"""The databases for suites built on `InboxSuite`: two kinds, in threads and in asyncio."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sqlalchemy import create_engine, event, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.db.engines import connect_arguments
from onceward.inbox import Inbox
from onceward.testing.inbox import InboxDriver, InboxSuite
from tests.support.schema import Schema, new_schema


class OnSqlite(InboxSuite):
    one_writer = True

    @pytest.fixture(autouse=True)
    def in_a_new_directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "inbox.db"
        self.path.write_bytes(_migrated())

    def engine(self, *, patience: float = 5.0, **options: Any) -> Any:
        return _quickly(
            create_engine(f"sqlite:///{self.path}", connect_args={"timeout": patience}, **options)
        )

    def engine_without_tables(self) -> Any:
        here, self.path = self.path, self.path.with_name("empty.db")
        try:
            return self.engine()
        finally:
            self.path = here


class OnAsyncSqlite(OnSqlite):
    def engine(self, *, patience: float = 5.0, **options: Any) -> Any:
        url = make_url(f"sqlite+aiosqlite:///{self.path}")
        arguments = {**connect_arguments(url), "timeout": patience}  # as an app's
        return _quickly(create_async_engine(url, connect_args=arguments, **options))


@cache
def _migrated() -> bytes:
    """A file with the inbox's tables: making them takes longer than most tests."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "inbox.db"
        engine = create_engine(f"sqlite:///{path}")
        Inbox(engine).migrate()
        engine.dispose()
        return path.read_bytes()


def _quickly(engine: Any) -> Any:
    """Do not wait for the disk: power cuts are not tested here."""

    @event.listens_for(getattr(engine, "sync_engine", engine), "connect")
    def connect(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous = OFF")
        cursor.close()

    return engine


TABLES = ("written", *(f"onceward_{name}" for name in (
    "consumers", "dedup", "kept", "attempts", "effects", "sequences", "parked", "horizons", "holds",
)))  # fmt: skip


def empty(schema: Schema) -> None:
    found = schema.execute(f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema.name}'")
    there = {name for (name,) in found}
    # Not TRUNCATE: it makes new files, thousands of them in the end, and the server's stop waits for the disk.
    schema.execute("; ".join(f"DELETE FROM {schema.name}.{name}" for name in TABLES if name in there))


@pytest.fixture(scope="class")
def schema(postgres_url: str) -> Iterator[Schema]:
    """One for all tests of a class: making the tables takes longer than most of them."""
    with new_schema(postgres_url) as made:
        yield made


class OnPostgreSql(InboxSuite):
    make: Any = staticmethod(create_engine)

    @pytest.fixture(autouse=True)
    def in_an_empty_schema(self, schema: Schema) -> Iterator[None]:
        self.schema = schema
        yield
        empty(schema)

    def engine(self, *, patience: float = 5.0, **options: Any) -> Any:
        settings = f"-csearch_path={self.schema.name} -csynchronous_commit=off"
        return self.make(self.schema.url, connect_args={"options": settings}, **options)

    def engine_without_tables(self) -> Any:
        return self.make(self.schema.url, connect_args={"options": "-csearch_path=nowhere"})

    def advance(self, driver: InboxDriver, seconds: float) -> None:
        """The server's clock stays, so everything written so far moves into the past."""
        driver.clock.advance(seconds)  # for everything else that uses the clock
        name = self.schema.name
        self.schema.execute(f"UPDATE {name}.onceward_attempts SET locked_until = locked_until - {seconds}")
        self.schema.execute(f"UPDATE {name}.onceward_parked SET since = since - {seconds}")


class OnAsyncPostgreSql(OnPostgreSql):
    make = staticmethod(create_async_engine)
