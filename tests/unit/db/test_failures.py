"""A failing end, and errors caught inside: nothing is hidden, and nothing is half committed."""

# ruff: noqa: PT012, SIM117  leaving the block is what is tested, so it is inside `raises`

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, IntegrityError

from onceward.db import SessionError
from tests.support.orders_table import INSERT, _orders, orders  # noqa: F401

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)


# ── errors on the way out ───────────────────────────────────────────────────────────────────────────────


def break_rollback(database: Database) -> list[str]:
    calls: list[str] = []

    def fail(_: Any) -> None:
        calls.append("rollback")
        raise OSError("the network is gone")

    event.listen(database.plain(), "rollback", fail)
    return calls


@pytest.mark.req("QC-14")
def test_a_failing_rollback_does_not_hide_the_error_that_caused_it(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    calls = break_rollback(database)
    error = ValueError("the handler's own")
    with caplog.at_level(logging.WARNING, "onceward"), pytest.raises(ValueError) as caught:
        with database.session() as session:
            session.execute(INSERT, {"id": 1})
            raise error
    assert caught.value is error
    assert calls == ["rollback"]
    assert "the network is gone" in caught.value.__notes__[0]
    assert "rollback failed" in caplog.text
    assert orders(database) == 0  # its connection was discarded, and the transaction with it


def test_an_error_survives_a_connection_that_the_server_has_cut(postgresql: Database) -> None:
    with pytest.raises(ValueError, match="own"), postgresql.session() as session:
        session.execute(INSERT, {"id": 1})
        process = session.execute_scalar("SELECT pg_backend_pid()")
        postgresql.do(f"SELECT pg_terminate_backend({process}, 5000)")
        raise ValueError("the handler's own")
    assert orders(postgresql) == 0


def test_a_cut_connection_cannot_pass_for_a_commit(postgresql: Database) -> None:
    with pytest.raises(SessionError, match="nothing was committed"):
        with postgresql.session() as session:
            session.execute(INSERT, {"id": 1})
            process = session.execute_scalar("SELECT pg_backend_pid()")
            postgresql.do(f"SELECT pg_terminate_backend({process}, 5000)")
            with pytest.raises(DBAPIError):
                session.execute(INSERT, {"id": 2})
            with pytest.raises(SessionError, match="can only be rolled back"):
                session.execute(INSERT, {"id": 3})
    assert orders(postgresql) == 0


@pytest.fixture
def only_connection(database: Database) -> Any:
    """An engine with one connection that its pool does not reset, and foreign keys checked at the commit."""
    engine = database.engine(pool_size=1, max_overflow=0, pool_timeout=1, pool_reset_on_return=None)
    if database.is_sqlite:
        event.listen(
            database.plain(engine), "connect", lambda raw, _: raw.cursor().execute("PRAGMA foreign_keys = ON")
        )
    database.do(
        "CREATE TABLE lines (order_id INTEGER REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)",
    )
    return engine


@pytest.mark.req("QC-14")
def test_a_failing_commit_raises_and_the_connection_goes_back_clean(
    database: Database, only_connection: Any
) -> None:
    with pytest.raises(IntegrityError), database.session(only_connection) as session:
        session.execute("INSERT INTO lines (order_id) VALUES (7)")
    assert not session.committed
    with database.session(only_connection) as following:
        assert following.execute_scalar("SELECT count(*) FROM lines") == 0
        following.execute(INSERT, {"id": 1})
    assert orders(database) == 1


@pytest.mark.req("QC-14")
def test_a_connection_is_back_in_its_pool_after_each_session(
    database: Database, only_connection: Any
) -> None:
    for number in range(3):
        with database.session(only_connection) as session:
            session.execute(INSERT, {"id": number})
        with pytest.raises(ZeroDivisionError), database.session(only_connection) as session:
            session.execute(INSERT, {"id": -1})
            raise ZeroDivisionError
    assert orders(database) == 3


# ── errors that were caught inside ──────────────────────────────────────────────────────────────────────


def test_a_failed_statement_that_was_caught_never_ends_in_a_commit_of_nothing(postgresql: Database) -> None:
    with pytest.raises(SessionError, match="nothing was committed") as caught:
        with postgresql.session() as session:
            session.execute(INSERT, {"id": 1})
            with pytest.raises(IntegrityError) as failed:
                session.execute(INSERT, {"id": 1})
    assert caught.value.__cause__ is failed.value
    assert not session.committed
    assert orders(postgresql) == 0


def test_on_sqlite_a_failed_statement_undoes_only_itself(sqlite: Database) -> None:
    with sqlite.session() as session:
        session.execute(INSERT, {"id": 1})
        with pytest.raises(IntegrityError):
            session.execute(INSERT, {"id": 1})
    assert orders(sqlite) == 1


def test_going_back_to_a_savepoint_of_ones_own_mends_the_session(database: Database) -> None:
    with database.session() as session:
        session.execute(INSERT, {"id": 1})
        session.execute("SAVEPOINT before")
        with pytest.raises(IntegrityError):
            session.execute(INSERT, {"id": 1})
        session.execute("ROLLBACK TO SAVEPOINT before")
        session.execute(INSERT, {"id": 2})
    assert orders(database) == 2


def test_a_transaction_that_sqlite_ended_by_itself_is_neither_continued_nor_committed(
    sqlite: Database,
) -> None:
    sqlite.do(
        "CREATE TRIGGER veto BEFORE INSERT ON orders WHEN new.id = 13 BEGIN SELECT RAISE(ROLLBACK, 'no'); END"
    )
    with pytest.raises(SessionError, match="nothing was committed"):
        with sqlite.session() as session:
            session.execute(INSERT, {"id": 1})
            with pytest.raises(IntegrityError):
                session.execute(INSERT, {"id": 13})
            with pytest.raises(SessionError, match=r"can only be rolled back.*open a new"):
                session.execute(INSERT, {"id": 2})
    assert orders(sqlite) == 0


# ── an engine or event loop that ends first ─────────────────────────────────────────────────────────────


@pytest.mark.req("QC-14")
def test_a_session_that_outlives_the_pool_of_its_engine_closes_its_connection(database: Database) -> None:
    """Given back to a pool that lends nothing any more, it would stay open until the garbage is collected."""
    engine = database.engine()
    opened: list[Any] = []
    event.listen(database.plain(engine), "connect", lambda driver, _: opened.append(driver))
    event.listen(database.plain(engine), "close", lambda driver, _: opened.remove(driver))
    with database.session(engine) as session:
        session.execute(INSERT, {"id": 1})
        disposing = engine.dispose()
        if database.asynchronous:
            database.run(disposing)
        assert len(opened) == 1
    assert opened == []
    assert orders(database) == 1
