"""A schema for a boundary store on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore
from tests.support.schema import Schema, new_schema
from tests.support.wait import until


class StorePlace:
    def __init__(self, schema: Schema) -> None:
        self.name = schema.name
        self.url = f"{schema.plain_url}&application_name={schema.name}"
        self.admin = psycopg.connect(self.url, autocommit=True, application_name="admin")
        self.admin.execute("SET synchronous_commit = off")  # these commits need not be durable

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[PostgreSqlBoundaryStore]:
        store = await PostgreSqlBoundaryStore.open(make_conninfo(self.url, **options))
        try:
            yield store
        finally:
            await store.close()

    def ask(self, query: str) -> list[Any]:
        return self.admin.execute(query).fetchall()

    def empty(self) -> None:
        """As if nothing had ever been written."""
        for table in ("facts", "cursors", "holes", "objects", "uploads", "chunks"):
            self.admin.execute(f"DELETE FROM onceward_boundary_{table}")
        self.admin.execute("UPDATE onceward_boundary_log SET last = 0, bytes = 0, trusted_time = NULL")
        self.admin.execute("UPDATE onceward_boundary_usage SET objects = 0, bytes = 0")

    def waiting_for_a_lock(self) -> int:
        """How many connections stores have here."""
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{}' AND wait_event_type = 'Lock'"
        )
        [(count,)] = self.ask(query.format(self.name))
        return int(count)

    def wait_until_left(self) -> None:
        """Until no connection of a store is here any more."""
        query = f"SELECT FROM pg_stat_activity WHERE application_name = '{self.name}'"
        until(lambda: not self.ask(query))

    def kill_connections(self) -> int:
        """The connections of open stores. They are closed when this returns."""
        query = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = '{}'"
        return sum(killed for (killed,) in self.ask(query.format(self.name)))


@contextmanager
def new_place(postgres_url: str) -> Iterator[StorePlace]:
    with new_schema(postgres_url) as schema:
        made = StorePlace(schema)
        yield made
        made.admin.close()


@pytest.fixture(scope="class")
def shared_place(postgres_url: str) -> Iterator[StorePlace]:
    """Shared by the tests of a class: creating the tables takes longer than most of them."""
    with new_place(postgres_url) as made:
        yield made


@pytest.fixture
def place(postgres_url: str) -> Iterator[StorePlace]:
    with new_place(postgres_url) as made:
        yield made
