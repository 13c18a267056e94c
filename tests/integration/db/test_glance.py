"""A question that the driver is asked: whether a query finds a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event, text

from onceward.db.glance import Glance
from tests.support.schema import new_schema


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "sqlite":
        made = create_engine(f"sqlite:///{tmp_path}/shop.db", pool_size=1, max_overflow=0)
        yield made
        made.dispose()
        return
    with new_schema(request.getfixturevalue("postgres_url")) as schema:
        made = create_engine(schema.plain_url, pool_size=1, max_overflow=0)
        yield made
        made.dispose()


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM letters")).scalar_one())


@pytest.mark.req("OR-03")
def test_it_sees_what_others_have_committed(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE letters (consumer TEXT)"))
    glance = Glance(
        engine, "SELECT 1 FROM letters WHERE consumer = :consumer LIMIT 1", {"consumer": "billing"}
    )
    assert glance.finds() is False
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO letters VALUES ('billing')"))
    assert glance.finds() is True


@pytest.mark.req("OR-03")
def test_the_connection_is_in_transactions_afterwards(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE letters (consumer TEXT)"))
    assert Glance(engine, "SELECT 1 FROM letters", {}).finds() is False
    with engine.connect() as connection:  # the same one: the pool has no other
        connection.execute(text("INSERT INTO letters VALUES ('billing')"))
        connection.rollback()
    assert count(engine) == 0


@pytest.mark.req("OR-03")
def test_sqlalchemy_asks_if_the_driver_fails_or_somebody_listens(engine: Engine) -> None:
    glance = Glance(engine, "SELECT 1 FROM letters", {})
    assert glance.finds() is None
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE letters (consumer TEXT)"))
    assert glance.finds() is False
    event.listen(engine, "before_cursor_execute", lambda *_: None)
    assert glance.finds() is None
