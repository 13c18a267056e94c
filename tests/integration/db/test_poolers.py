"""Behind a pooler in transaction mode nothing may be prepared: the next transaction has another connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from onceward import Onceward
from onceward.boundary.stores.postgresql.connections import PostgreSqlConnections
from tests.support.deaf_pooler import deaf_pooler

PREPARED = "SELECT count(*) FROM pg_prepared_statements"
OFTEN = 10
"""psycopg prepares what it has executed five times."""


@pytest.fixture(params=[True, False], ids=["pooler", "server"])
def given(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[tuple[str, bool]]:
    """The URL of a database, and whether statements may be prepared there."""
    url = make_url(postgres_url)
    plain = url.set(drivername="postgresql")
    if not request.param:
        yield plain.render_as_string(hide_password=False), True
        return
    with deaf_pooler(Path(str(url.query["host"])) / ".s.PGSQL.5432") as port:
        pooled = plain.set(host="127.0.0.1", port=port, query={"sslmode": "disable"})
        yield pooled.render_as_string(hide_password=False), False


@pytest.mark.req("PG-14")
def test_an_engine_in_threads(given: tuple[str, bool]) -> None:
    url, prepares = given
    engine = Onceward("shop", database=url).create_engine()
    with engine.connect() as connection:
        found = [connection.execute(text(PREPARED)).scalar_one() for _ in range(OFTEN)]
    engine.dispose()
    assert (max(found) > 0) is prepares


@pytest.mark.req("PG-14")
def test_an_engine_in_asyncio(given: tuple[str, bool]) -> None:
    url, prepares = given

    async def ask() -> list[int]:
        engine = Onceward("shop", database=url).create_async_engine()
        async with engine.connect() as connection:
            found = [(await connection.execute(text(PREPARED))).scalar_one() for _ in range(OFTEN)]
        await engine.dispose()
        return found

    assert (max(asyncio.run(ask())) > 0) is prepares


@pytest.mark.req("PG-14")
def test_a_store_of_a_boundary(given: tuple[str, bool]) -> None:
    url, prepares = given

    async def ask() -> list[int]:
        connections, found = PostgreSqlConnections(url, 1), []
        for _ in range(OFTEN):
            async with connections.one() as connection:
                [(count,)] = await (await connection.execute(PREPARED)).fetchall()
                found.append(count)
        await connections.close()
        return found

    assert (max(asyncio.run(ask())) > 0) is prepares
