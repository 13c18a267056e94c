"""Locks on rows and names: held to the end of the session, and waited for only for a limited time."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine

from onceward.db import DbSession, LockTimeoutError, RowError
from onceward.db.operations import key_of
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

ORDERS = Table("orders", MetaData(), Column("id", Integer), Column("item", String))
NAMES: list[str | int] = ["reports", 42, -(2**63)]


@pytest.fixture(autouse=True)
def _orders(request: pytest.FixtureRequest) -> None:
    for name in {"database", "postgresql", "sqlite"} & set(request.fixturenames):
        database = request.getfixturevalue(name)
        database.do("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
        database.do("INSERT INTO orders VALUES (1, 'tea'), (2, 'rice'), (3, 'rice')")


@pytest.mark.parametrize("where", ["orders", ORDERS], ids=["name", "Table"])
def test_a_locked_row_is_returned_and_a_missing_one_is_none(database: Database, where: Any) -> None:
    with database.session() as session:
        assert session.lock_row(where, {"id": 1}) == {"id": 1, "item": "tea"}
        assert session.lock_row(where, {"id": 9}) is None
        with pytest.raises(RowError, match="more than one row"):
            session.lock_row(where, {"item": "rice"})
        session.execute("DELETE FROM orders WHERE id = 1")
    assert database.scalar("SELECT count(*) FROM orders") == 2


def test_a_row_is_locked_until_the_session_ends(postgresql: Database) -> None:
    with postgresql.session() as holder:
        holder.lock_row("orders", {"id": 1})
        with postgresql.session() as other:
            began = time.monotonic()
            with pytest.raises(LockTimeoutError, match=r"orders \{'id': 1\} was locked .* longer than 0.1 s"):
                other.lock_row("orders", {"id": 1}, timeout=0.1)
            assert 0.1 <= time.monotonic() - began < 30
            assert other.lock_row("orders", {"id": 2}, timeout=0.1) == {"id": 2, "item": "rice"}
    with postgresql.session() as other:
        assert other.lock_row("orders", {"id": 1}, timeout=0) == {"id": 1, "item": "tea"}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_locked_until_the_session_ends(postgresql: Database, name: str | int) -> None:
    with postgresql.session() as holder:
        holder.advisory_lock(name)
        holder.advisory_lock(name)
        with postgresql.session() as other:
            with pytest.raises(LockTimeoutError, match="advisory lock"):
                other.advisory_lock(name, timeout=0.05)
            other.advisory_lock("another name", timeout=0.05)
    with postgresql.session() as other:
        other.advisory_lock(name, timeout=0)


def test_after_a_timeout_the_session_goes_on_and_commits(postgresql: Database) -> None:
    with postgresql.session() as holder:
        holder.advisory_lock("reports")
        with postgresql.session() as other:
            other.execute("DELETE FROM orders WHERE id = 1")
            with pytest.raises(LockTimeoutError):
                other.advisory_lock("reports", timeout=0)
            other.execute("DELETE FROM orders WHERE id = 2")
    assert other.committed
    assert postgresql.scalar("SELECT count(*) FROM orders") == 1


@pytest.mark.parametrize("end", [None, ZeroDivisionError(), KeyboardInterrupt()], ids=repr)
def test_an_advisory_lock_does_not_travel_with_a_pooled_connection(
    postgresql: Database, end: BaseException | None
) -> None:
    engine = postgresql.engine(pool_size=1, max_overflow=0, pool_reset_on_return=None)
    try:
        with postgresql.session(engine) as holder:
            process = holder.execute_scalar("SELECT pg_backend_pid()")
            holder.advisory_lock("reports")
            if end is not None:
                raise end
    except (ZeroDivisionError, KeyboardInterrupt):
        pass
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = :process"
    with postgresql.session() as other:
        assert other.execute_scalar(held, {"process": process}) == 0
        other.advisory_lock("reports", timeout=0)
    with postgresql.session(engine) as same_connection:
        assert same_connection.execute_scalar("SELECT pg_backend_pid()") == process


def test_the_timeout_of_a_lock_is_no_timeout_of_what_follows(postgresql: Database) -> None:
    def setting() -> Any:
        return session.execute_scalar("SELECT current_setting('lock_timeout')")

    with postgresql.session() as session:
        session.execute("SET LOCAL lock_timeout = '7s'")
        session.advisory_lock("reports", timeout=3)
        assert setting() == "7s"
        session.lock_row("orders", {"id": 1}, timeout=3)
        assert setting() == "7s"
        with postgresql.session() as other, pytest.raises(LockTimeoutError):
            other.advisory_lock("reports", timeout=0)
    with postgresql.session() as session:
        assert setting() == "0"


def test_on_sqlite_a_session_has_the_whole_database_so_locks_are_there_already(sqlite: Database) -> None:
    impatient = sqlite.engine(connect_args={"timeout": 0.1})
    with sqlite.session() as holder:
        holder.advisory_lock("reports", timeout=0)
        holder.lock_row("orders", {"id": 1}, timeout=0)
        began = time.monotonic()
        with pytest.raises(LockTimeoutError, match="kept the database locked"), sqlite.session(impatient):
            pass
        assert 0.1 <= time.monotonic() - began < 30
    with sqlite.session(impatient) as other:
        other.advisory_lock("reports", timeout=0)


def test_a_session_that_only_reads_on_sqlite_sees_one_state_throughout(sqlite: Database) -> None:
    impatient = sqlite.engine(connect_args={"timeout": 0.1})
    with sqlite.session() as reader:
        before = reader.execute_scalar("SELECT count(*) FROM orders")
        with pytest.raises(LockTimeoutError), sqlite.session(impatient):
            pass
        assert reader.execute_scalar("SELECT count(*) FROM orders") == before


def test_a_timeout_that_is_no_time_is_refused(database: Database) -> None:
    with database.session() as session:
        for timeout in (-1, float("nan"), float("inf")):
            with pytest.raises(ConfigurationError, match="number of seconds"):
                session.advisory_lock("reports", timeout=timeout)
            with pytest.raises(ConfigurationError, match="number of seconds"):
                session.lock_row("orders", {"id": 1}, timeout=timeout)


def test_a_number_beyond_64_bits_is_no_lock(database: Database) -> None:
    with database.session() as session:
        for number in (2**63, -(2**63) - 1):
            with pytest.raises(ConfigurationError, match="64 bits"):
                session.advisory_lock(number)


def test_a_name_has_the_same_key_in_every_process_and_version() -> None:
    assert key_of("reports") == 7823569523252811056


def test_a_session_that_finds_the_database_locked_leaves_no_cursor_for_the_garbage_collector(
    tmp_path: Path,
) -> None:
    """It would be reset in any thread, which waits for who uses its connection: forever, if that one waits for a
    transaction of this thread."""
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db", connect_args={"timeout": 0})
    with engine.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(LockTimeoutError) as kept, DbSession(engine):
            pass
        mine = [
            value
            for frame, _ in walk_tb(kept.value.__cause__.orig.__traceback__)  # type: ignore[union-attr]
            for value in frame.f_locals.values()
            if isinstance(value, sqlite3.Cursor)
        ]
        assert mine
        for cursor in mine:
            with pytest.raises(sqlite3.ProgrammingError, match="closed"):
                cursor.fetchone()
        other.exec_driver_sql("ROLLBACK")
    engine.dispose()
