"""Engines as users set them up: every pool, memory and file, and SQLite's ways to begin a transaction."""

# ruff: noqa: PT012  leaving the block is what is tested, so it is inside `raises`

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.pool import NullPool, StaticPool

from onceward.db import SessionError

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

CREATE = "CREATE TABLE orders (id INTEGER PRIMARY KEY)"
INSERT = "INSERT INTO orders (id) VALUES (:id)"
COUNT = "SELECT count(*) FROM orders"


def behaves(database: Database, engine: Any) -> None:
    """One transaction with savepoints, which a rollback undoes completely."""
    with database.session(engine) as session:
        session.execute(CREATE)
        session.execute(INSERT, {"id": 1})
    with pytest.raises(ZeroDivisionError), database.session(engine) as session:
        session.execute(INSERT, {"id": 2})
        assert session.insert_idempotent("orders", {"id": 1}) is False
        assert session.insert_idempotent("orders", {"id": 3}) is True
        session.execute("DROP TABLE orders")
        raise ZeroDivisionError
    with database.session(engine) as session:
        assert session.fetch_all("SELECT id FROM orders") == [{"id": 1}]


POOLS: list[dict[str, Any]] = [
    {"poolclass": NullPool},
    {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1},
    {"poolclass": StaticPool},
    {"pool_size": 1, "pool_reset_on_return": None},
]


@pytest.mark.req("QC-14")
@pytest.mark.parametrize("options", POOLS, ids=["none", "one connection", "static", "no reset"])
def test_a_session_is_one_transaction_on_every_pool(database: Database, options: dict[str, Any]) -> None:
    behaves(database, database.engine(**options))


def recipe(database: Database) -> Any:
    """What SQLAlchemy's manual recommends for sqlite3's transactions."""
    engine = database.engine()

    def connected(raw: Any, _: Any) -> None:
        raw.isolation_level = None

    event.listen(database.plain(engine), "connect", connected)
    event.listen(database.plain(engine), "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


SETUPS: dict[str, Any] = {
    "as it comes": lambda database: database.engine(),
    "the manual's listeners": recipe,
    "AUTOCOMMIT": lambda database: database.engine(isolation_level="AUTOCOMMIT"),
    "SERIALIZABLE": lambda database: database.engine(isolation_level="SERIALIZABLE"),
    "memory": lambda database: database.engine("sqlite://"),
    "memory, shared": lambda database: database.engine("sqlite://", poolclass=StaticPool),
}
if sys.version_info >= (3, 12):
    SETUPS["autocommit=False"] = lambda database: database.engine(connect_args={"autocommit": False})


@pytest.mark.parametrize("setup", SETUPS)
def test_a_session_is_one_transaction_however_sqlite_was_set_up(sqlite: Database, setup: str) -> None:
    behaves(sqlite, SETUPS[setup](sqlite))


def test_the_engine_is_left_as_it_is(sqlite: Database) -> None:
    begun: list[str] = []
    engine = sqlite.plain()

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        begun.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    with sqlite.session() as session:
        session.execute(CREATE)
    assert begun == [CREATE]  # the session's own BEGIN goes to the driver
    del begun[:]
    sqlite.read_without_session(COUNT)
    assert begun == [COUNT]


@pytest.mark.parametrize("memory", ["sqlite://", None], ids=["memory", "file"])
def test_a_second_session_on_the_only_connection_is_refused_and_harms_nothing(
    sqlite: Database, memory: str | None
) -> None:
    engine = sqlite.engine(memory, poolclass=StaticPool)
    with sqlite.session(engine) as first:
        first.execute(CREATE)
        first.execute(INSERT, {"id": 1})
        with pytest.raises(SessionError, match=r"one connection for all sessions.*end that one first"):
            sqlite.session(engine).__enter__()
        first.execute(INSERT, {"id": 2})
    with sqlite.session(engine) as after:
        assert after.execute_scalar(COUNT) == 2


def test_the_only_connection_is_free_again_after_every_end(sqlite: Database) -> None:
    engine = sqlite.engine("sqlite://", poolclass=StaticPool)
    with pytest.raises(ZeroDivisionError), sqlite.session(engine):
        raise ZeroDivisionError
    event.listen(sqlite.plain(engine), "begin", _refuse, once=True)
    with pytest.raises(OSError, match="not now"):
        sqlite.session(engine).__enter__()
    with sqlite.session(engine) as session:
        assert session.execute_scalar("SELECT 1") == 1


def _refuse(_: Any) -> None:
    raise OSError("not now")


def test_a_second_session_in_a_thread_with_one_memory_database_is_refused_and_harms_nothing(
    sqlite: Database,
) -> None:
    engine = sqlite.engine("sqlite://")
    with sqlite.session(engine) as first:
        first.execute(CREATE)
        with pytest.raises(SessionError, match="one connection for all"):
            sqlite.session(engine).__enter__()
        first.execute(INSERT, {"id": 1})
    with sqlite.session(engine) as after:
        assert after.execute_scalar(COUNT) == 1
