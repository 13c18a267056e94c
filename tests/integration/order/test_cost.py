"""What a fetch costs: not more if many messages have not lined up yet, or stand in line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine, text

from onceward.connectors import SqliteConnector
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.transaction import Transaction, Verdict
from tests.support.lines import end, key_of
from tests.support.schema import new_schema

FEW, MANY = 1200, 8000
Connector = SqliteConnector | PostgreSqlConnector


def dispatch(connector: Connector, count: int, keys: int, first: str = "k") -> None:
    messages = [Transaction(payload={"key": f"{first}{number % keys}"}) for number in range(count)]
    connector.dispatch_transactions(messages)


def fetch_and_end(connector: Connector, times: int = 5) -> None:
    for _ in range(times):
        taken = connector.fetch_transactions(100)
        assert len(taken) == 100
        end(connector, Verdict.DONE, *taken)


def steps_of(connector: SqliteConnector, act: Callable[[], object]) -> int:
    """How many steps SQLite makes meanwhile, in hundreds."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    connection = connector._rows.cursor.connection
    connection.set_progress_handler(count, 100)
    act()
    connection.set_progress_handler(None, 0)
    return steps


@contextmanager
def sqlite_with(path: Path, stuck: int) -> Iterator[SqliteConnector]:
    """A queue in which these stand in line behind one that is leased."""
    with SqliteConnector(path, synchronous="OFF") as connector:
        connector.keep_order(key_of, hold_dead=True)
        dispatch(connector, stuck, 1, "stuck")
        assert len(connector.fetch_transactions(100)) == 1
        assert connector.fetch_transactions(100) == []
        yield connector


@pytest.mark.req("OR-08")
def test_a_fetch_from_sqlite_does_not_pass_newcomers(tmp_path: Path) -> None:
    def steps_with(unlined: int) -> int:
        with sqlite_with(tmp_path / f"{unlined}.db", stuck=1) as connector:
            dispatch(connector, unlined, 500)
            fetch_and_end(connector)
            return steps_of(connector, lambda: fetch_and_end(connector))

    assert steps_with(MANY) < 2 * steps_with(FEW)


@pytest.mark.req("OR-08")
def test_a_fetch_from_sqlite_does_not_pass_those_in_line(tmp_path: Path) -> None:
    def steps_with(stuck: int) -> int:
        with sqlite_with(tmp_path / f"{stuck}.db", stuck) as connector:
            return steps_of(connector, lambda: connector.fetch_transactions(100))

    assert steps_with(MANY) < 2 * steps_with(FEW) + 2


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[str]:
    with new_schema(postgres_url) as schema:
        yield schema.plain_url


def rows_read_from(postgres: str, act: Callable[[], object]) -> int:
    """How many rows PostgreSQL reads meanwhile in the tables of queues, by connections that `act` closes."""
    engine = create_engine(postgres, poolclass=NullPool)

    def rows_read() -> int:
        with engine.begin() as connection:
            found = text(
                "SELECT sum(idx_tup_fetch) FROM pg_stat_user_tables WHERE relname LIKE 'onceward_queue_%'"
                " AND schemaname = current_schema()"
            )
            return int(connection.execute(found).scalar_one())

    before = rows_read()
    act()
    return rows_read() - before


@contextmanager
def postgresql_queue(url: str, name: str) -> Iterator[PostgreSqlConnector]:
    with PostgreSqlConnector(url, name) as connector:
        connector.keep_order(key_of, hold_dead=True)
        yield connector


@pytest.mark.req("OR-08")
def test_a_fetch_from_postgresql_does_not_pass_newcomers(postgres: str) -> None:
    def read_with(unlined: int) -> int:
        with postgresql_queue(postgres, f"q{unlined}") as connector:
            dispatch(connector, unlined, 500)
            fetch_and_end(connector, 1)

        def act() -> None:
            with postgresql_queue(postgres, f"q{unlined}") as connector:
                fetch_and_end(connector)

        return rows_read_from(postgres, act)

    few = read_with(FEW)
    assert read_with(MANY) < 2 * few


@pytest.mark.req("OR-08")
def test_a_fetch_from_postgresql_does_not_pass_those_in_line(postgres: str) -> None:
    def read_with(stuck: int) -> int:
        with postgresql_queue(postgres, f"q{stuck}") as connector:
            dispatch(connector, stuck, 1, "stuck")
            assert len(connector.fetch_transactions(100)) == 1
            assert connector.fetch_transactions(100) == []
            dispatch(connector, FEW, 250)
            fetch_and_end(connector, 1)

        def act() -> None:
            with postgresql_queue(postgres, f"q{stuck}") as connector:
                dispatch(connector, 1, 1, "stuck")
                fetch_and_end(connector)

        return rows_read_from(postgres, act)

    few = read_with(10)
    assert read_with(MANY) < 2 * few
