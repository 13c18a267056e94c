"""KeyboardInterrupt in a thread while the database runs a statement."""

# ruff: noqa: PT012, SIM117  leaving the block is what is tested, so it is inside `raises`

from __future__ import annotations

import _thread
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

import pytest
from sqlalchemy.pool import StaticPool

from onceward.db import SessionError

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

in_threads = pytest.mark.parametrize(
    "database",
    [("sqlite", "threads"), ("postgresql", "threads")],
    indirect=True,
    ids=["sqlite", "postgresql"],
)
SLOW = {
    "sqlite": """
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000000)
        SELECT i FROM n ORDER BY i DESC -- sorted: not even the first row is there before the last
    """,
    "postgresql": "SELECT pg_sleep(5)",
}
INSERT = "INSERT INTO orders (id) VALUES (:id)"


@pytest.fixture(autouse=True)
def _orders(database: Database) -> None:
    database.do("CREATE TABLE orders (id INTEGER PRIMARY KEY)")


@contextmanager
def interrupted() -> Iterator[None]:
    # By then the statement is running, and it still is.
    timer = Timer(0.4, _thread.interrupt_main)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@in_threads
@pytest.mark.req("QC-14")
def test_an_interrupt_in_a_statement_rolls_back_at_once(database: Database) -> None:
    impatient = database.engine(connect_args={"timeout": 0.1} if database.is_sqlite else {})
    with pytest.raises(KeyboardInterrupt) as still_alive:
        with database.session() as session, interrupted():
            session.execute(INSERT, {"id": 1})
            session.fetch_one(SLOW[database.name])
    with database.session(impatient) as other:
        assert other.execute_scalar("SELECT count(*) FROM orders") == 0
    assert still_alive.value.__traceback__ is not None


@in_threads
def test_an_interrupt_that_was_caught_inside_leaves_only_the_rollback(database: Database) -> None:
    with pytest.raises(SessionError, match="nothing was committed"):
        with database.session() as session:
            session.execute(INSERT, {"id": 1})
            with pytest.raises(KeyboardInterrupt), interrupted():
                session.fetch_one(SLOW[database.name])
            with pytest.raises(SessionError, match="can only be rolled back"):
                session.execute(INSERT, {"id": 2})
    assert database.scalar("SELECT count(*) FROM orders") == 0


@pytest.mark.parametrize("database", [("sqlite", "threads")], indirect=True)
def test_a_database_in_memory_survives_an_interrupt(database: Database) -> None:
    engine = database.engine("sqlite://", poolclass=StaticPool)
    with database.session(engine) as session:
        session.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    with pytest.raises(KeyboardInterrupt), database.session(engine) as session, interrupted():
        session.execute(INSERT, {"id": 1})
        session.fetch_one(SLOW["sqlite"])
    with database.session(engine) as session:
        assert session.execute_scalar("SELECT count(*) FROM orders") == 0
