"""A session is one transaction: how it begins, how it ends, and what it refuses."""

# ruff: noqa: PT012  leaving the block is what is tested, so it is inside `raises`

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.db import AsyncDbSession, DbSession, SessionError
from onceward.errors import ConfigurationError, OncewardError
from tests.support.orders_table import INSERT, _orders, orders  # noqa: F401
from tests.support.wait import until

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)


@pytest.mark.req("QC-14")
def test_leaving_the_block_commits_everything(database: Database) -> None:
    with database.session() as session:
        session.execute(INSERT, {"id": 1})
        session.execute(INSERT, {"id": 2})
        assert not session.committed
    assert session.committed
    assert orders(database) == 2


@pytest.mark.req("QC-14")
@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), asyncio.CancelledError(), GeneratorExit()]
)
def test_any_exception_rolls_everything_back_and_goes_on(database: Database, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, database.session() as session:
        session.execute(INSERT, {"id": 1})
        raise error
    assert caught.value is error
    assert not session.committed
    assert orders(database) == 0


def test_another_session_does_not_see_what_is_not_committed(postgresql: Database) -> None:
    with postgresql.session() as session:
        session.execute(INSERT, {"id": 1})
        assert orders(postgresql) == 0


@pytest.mark.req("QC-14")
def test_a_session_cannot_be_entered_again(database: Database) -> None:
    with database.session() as session:
        session.execute(INSERT, {"id": 1})
    with (
        pytest.raises(
            SessionError, match=r"has ended and cannot be used again.*make a new (Async)?DbSession"
        ),
        session,
    ):
        pass
    assert orders(database) == 1


@pytest.mark.req("QC-14")
def test_a_session_cannot_be_nested_in_itself_and_the_outer_one_is_unharmed(database: Database) -> None:
    with database.session() as session:
        session.execute(INSERT, {"id": 1})
        with pytest.raises(SessionError, match=r"cannot be nested.*second (Async)?DbSession"), session:
            pass
        session.execute(INSERT, {"id": 2})
    assert orders(database) == 2


CALLS: list[tuple[str, Any]] = [
    ("execute", ("SELECT 1",)),
    ("execute_scalar", ("SELECT 1",)),
    ("fetch_one", ("SELECT 1",)),
    ("fetch_all", ("SELECT 1",)),
    ("insert_idempotent", ("orders", {"id": 1})),
    ("lock_row", ("orders", {"id": 1})),
    ("advisory_lock", ("orders",)),
]


@pytest.mark.req("QC-14")
def test_a_session_works_only_inside_its_block(database: Database) -> None:
    session = database.session()
    for name, arguments in CALLS:
        with pytest.raises(
            SessionError, match=r"not open; use it inside its block, `(with D|async with AsyncD)bSession"
        ):
            getattr(session, name)(*arguments)
    with session:
        pass
    for name, arguments in CALLS:
        with pytest.raises(SessionError, match=r"has ended with its block; open a new (Async)?DbSession"):
            getattr(session, name)(*arguments)
    assert orders(database) == 0


def test_leaving_a_block_that_was_never_entered_is_refused(database: Database) -> None:
    with pytest.raises(SessionError, match="not open"):
        database.session().__exit__(None, None, None)


def test_a_session_that_could_not_be_opened_cannot_be_entered_again(database: Database) -> None:
    nowhere = (
        "sqlite:////no/such/folder/test.db"
        if database.is_sqlite
        else "postgresql+psycopg://nobody@127.0.0.1:1/none"
    )
    session = database.session(database.engine(nowhere))
    before = threading.enumerate()
    with pytest.raises(DBAPIError), session:
        pass
    until(lambda: set(threading.enumerate()) <= {*before})  # aiosqlite's thread needs the event loop to end
    with pytest.raises(SessionError, match="make a new"), session:
        pass


# ── what it is made from ────────────────────────────────────────────────────────────────────────────────


def test_each_kind_of_session_refuses_the_engine_of_the_other() -> None:
    engine: Any = create_engine("sqlite://")
    asynchronous: Any = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(ConfigurationError, match="use AsyncDbSession"):
        DbSession(asynchronous)
    with pytest.raises(ConfigurationError, match="use AsyncDbSession"):
        DbSession(asynchronous.sync_engine)
    with pytest.raises(ConfigurationError, match="use DbSession"):
        AsyncDbSession(engine)
    with pytest.raises(ConfigurationError, match="needs an Engine"):
        DbSession("sqlite://")  # type: ignore[arg-type]


def test_an_unknown_database_is_refused_by_name() -> None:
    engine = create_engine("sqlite://")
    engine.dialect.name = "oracle"
    with pytest.raises(ConfigurationError, match="sqlite and postgresql, not on 'oracle'"):
        DbSession(engine)


def test_an_engine_that_commits_each_statement_is_refused(postgresql: Database) -> None:
    engine = postgresql.engine(isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="READ COMMITTED"), postgresql.session(engine):
        pass
    with postgresql.session(engine.execution_options(isolation_level="READ COMMITTED")) as session:
        session.execute(INSERT, {"id": 1})
    assert orders(postgresql) == 1


def test_every_error_of_a_session_is_an_onceward_error() -> None:
    assert issubclass(SessionError, OncewardError)


def test_sync_and_async_sessions_have_the_same_methods_with_the_same_parameters() -> None:
    def methods(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(DbSession) == methods(AsyncDbSession)


def test_the_session_for_threads_needs_no_greenlet() -> None:
    code = "import sys; sys.modules['greenlet'] = None; import onceward.db; print(onceward.db.DbSession.__name__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "DbSession\n"
