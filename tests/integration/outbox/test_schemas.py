"""The outbox in a schema of PostgreSQL: messages go to the table that the app's relay reads, and to no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text

from onceward.outbox import OutboxError
from tests.support.outbox import OutboxWorld, drain
from tests.support.schema import Schema, new_schema

pytestmark = pytest.mark.req("OB-27")


@pytest.fixture
def schemas(postgres_url: str) -> Iterator[tuple[Schema, Schema]]:
    with new_schema(postgres_url) as one, new_schema(postgres_url) as two:
        yield one, two


@pytest.fixture
def worlds(schemas: tuple[Schema, Schema]) -> Iterator[tuple[OutboxWorld, OutboxWorld]]:
    """Two tenants: the same app, each with tables in a schema of its own."""
    made = OutboxWorld(schemas[0].plain_url), OutboxWorld(schemas[1].plain_url)
    yield made
    for each in made:
        each.close()


def test_a_search_path_that_the_caller_sets_does_not_move_a_message(
    worlds: tuple[OutboxWorld, OutboxWorld], schemas: tuple[Schema, Schema]
) -> None:
    ours, other = worlds
    send: Any
    for path in (schemas[1].name, "public", "pg_catalog"):
        with ours.engine.begin() as connection:
            connection.execute(text(f"SET LOCAL search_path TO {path}"))
            send = ours.app.outbox(connection).send
            send("redis://x/ship", path)
            send("redis://x/ship", path, delay=0.001)
            assert ours.app.outbox(connection).cancel(send("redis://x/ship", path, delay=100)) is True
            send("redis://x/ship", path, id=path)
            with pytest.raises(OutboxError, match="in the outbox already"):
                send("redis://x/ship", "another", id=path)
    assert len(ours.rows()) == 9
    assert other.rows() == []
    drain(ours.relay())


def test_a_connection_of_another_schema_sends_to_the_one_of_the_app(
    worlds: tuple[OutboxWorld, OutboxWorld], schemas: tuple[Schema, Schema]
) -> None:
    ours, other = worlds
    with psycopg.connect(schemas[1].plain_url) as plain:
        ours.app.outbox(plain).send("redis://x/ship", 1)
    engine = create_engine(schemas[1].url, connect_args=schemas[1].connect_args)
    with engine.begin() as connection:
        ours.app.outbox(connection).send("redis://x/ship", 2)
    engine.dispose()
    assert len(ours.rows()) == 2
    assert other.rows() == []


def test_a_table_that_only_another_schema_has_is_missing(
    worlds: tuple[OutboxWorld, OutboxWorld], schemas: tuple[Schema, Schema]
) -> None:
    ours, _ = worlds
    schemas[0].execute(f"DROP TABLE {schemas[0].name}.onceward_outbox")
    with psycopg.connect(schemas[1].plain_url) as plain:
        with pytest.raises(OutboxError, match="onceward_outbox does not exist"):
            ours.app.outbox(plain).send("redis://x/ship", 1)
        plain.execute("SELECT 1")  # its transaction can go on
