"""What a fetch costs: not more if many messages have not lined up yet, or wait in line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine, text

from onceward.connectors import SqliteConnector
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.transaction import Transaction, Verdict
from tests.support.lines import end, key_of
from tests.support.schema import new_schema
from tests.support.wait import until

FEW, MANY = 1200, 8000
TABLES = ("messages", "delayed", "turns")
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
    """A queue in which these wait in line behind one that is leased."""
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
        yield f"{schema.plain_url}&application_name={schema.name}"


def rows_read_from(postgres: str, act: Callable[[], object]) -> int:
    """How many rows PostgreSQL reads meanwhile in the tables of queues, by connections that `act` closes. It counts
    them when the process of a connection ends, which is a little later."""
    engine = create_engine(postgres, poolclass=NullPool)
    others = text(
        "SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        " AND application_name = current_setting('application_name')"
    )

    def are_closed() -> bool:
        with engine.begin() as connection:
            return connection.execute(others).scalar_one() == 0

    def rows_read() -> int:
        until(are_closed)
        with engine.begin() as connection:
            found = text(
                "SELECT sum(idx_tup_fetch) FROM pg_stat_user_tables WHERE relname LIKE 'onceward_queue_%'"
                " AND schemaname = current_schema()"
            )
            return int(connection.execute(found).scalar_one())

    before = rows_read()
    act()
    return rows_read() - before


def look_at_tables(postgres: str, how: str) -> None:
    if how == "none":
        return
    engine = create_engine(postgres, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for table in TABLES:
            connection.execute(text(f"{how} onceward_queue_{table}"))


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
@pytest.mark.parametrize("statistics", ["none", "VACUUM", "ANALYZE", "VACUUM ANALYZE"])
def test_a_fetch_from_postgresql_does_not_pass_those_in_line(postgres: str, statistics: str) -> None:
    """Also if PostgreSQL knows how large its tables are, but not that one queue has all of it."""

    def read_with(stuck: int) -> int:
        with postgresql_queue(postgres, f"q{stuck}") as connector:
            dispatch(connector, stuck, 1, "stuck")
            assert len(connector.fetch_transactions(100)) == 1
            assert connector.fetch_transactions(100) == []
            dispatch(connector, FEW, 250)
            fetch_and_end(connector, 1)
        look_at_tables(postgres, statistics)

        def act() -> None:
            with postgresql_queue(postgres, f"q{stuck}") as connector:
                dispatch(connector, 1, 1, "stuck")
                fetch_and_end(connector)

        return rows_read_from(postgres, act)

    few = read_with(10)
    assert read_with(MANY) < 2 * few


def analyze_before(postgres: str, crowd: str) -> None:
    """Statistics from before the queue was there: all rows were those of another queue, or had just been deleted."""
    with postgresql_queue(postgres, "other") as connector:
        dispatch(connector, MANY, 1, "stuck")
        assert len(connector.fetch_transactions(100)) == 1
        assert connector.fetch_transactions(100) == []
        dispatch(connector, FEW, 250)
        fetch_and_end(connector, 1)
    engine = create_engine(postgres, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for table in TABLES:
            name = f"onceward_queue_{table}"
            connection.execute(text(f"ALTER TABLE {name} SET (autovacuum_enabled = false)"))
            if crowd == "deleted":
                connection.execute(text(f"DELETE FROM {name}"))
            connection.execute(text(f"ANALYZE {name}"))


def end_in_every_way(connector: PostgreSqlConnector) -> None:
    refused = TransactionException("no", ExceptionCategory.BUSINESS)
    for _ in range(5):
        dead, returned, *rest = connector.fetch_transactions(100)
        end(connector, Verdict.DONE, *rest)
        end(connector, Verdict.FAILED, dead, error=refused)
        end(connector, Verdict.RETURNED, returned, delay=60.0)
        connector.hasten_transactions([returned])
        connector.lines_behind([dead.payload["key"]], 5)


@pytest.mark.req("OR-08")
@pytest.mark.parametrize("crowd", ["deleted", "of another queue"])
def test_nothing_in_postgresql_passes_those_in_line_with_statistics_from_before(
    postgres: str, crowd: str
) -> None:
    """PostgreSQL then takes any index that begins with the queue for as good as any other."""
    analyze_before(postgres, crowd)

    def read_with(stuck: int) -> int:
        with postgresql_queue(postgres, f"q{stuck}") as connector:
            dispatch(connector, stuck, 1, "stuck")
            assert len(connector.fetch_transactions(100)) == 1
            assert connector.fetch_transactions(100) == []
            dispatch(connector, FEW, 250)
            fetch_and_end(connector, 1)

        def act() -> None:
            with postgresql_queue(postgres, f"q{stuck}") as connector:
                end_in_every_way(connector)

        return rows_read_from(postgres, act)

    few = read_with(10)
    assert read_with(MANY) < 2 * few
