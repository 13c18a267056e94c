"""Queues in the application's SQLite database."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from onceward.connectors import SqliteConnector
from onceward.connectors.codec import encode_all
from onceward.connectors.sqlite import append_in
from onceward.errors import ConfigurationError
from onceward.transaction import Transaction
from tests.integration.inspection.test_balance import Shop, numbers, order

pytestmark = pytest.mark.req("PG-11")


def payloads(queue: SqliteConnector) -> list[object]:
    return [each.payload for each in queue.fetch_transactions(10)]


def test_queues_of_one_file_share_nothing_and_leave_the_file_to_its_application(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 42")
        connection.execute("CREATE TABLE messages (text TEXT)")
    with SqliteConnector(path, queue="a") as one, SqliteConnector(path, queue="b") as other:
        one.dispatch_transactions([Transaction(payload=1)])
        assert payloads(other) == []
        assert payloads(one) == [1]
    with SqliteConnector(path, queue="a") as again:
        assert again.counts() == {"ready": 0, "leased": 1, "delayed": 0, "dead": 0}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (42,)
        assert connection.execute("SELECT count(*) FROM messages").fetchone() == (0,)


def test_a_file_that_is_one_queue_has_no_named_ones_and_a_database_is_no_queue_without_a_name(
    tmp_path: Path,
) -> None:
    SqliteConnector(tmp_path / "queue.db").close()
    with pytest.raises(ConfigurationError, match="remove queue= from the source"):
        SqliteConnector(tmp_path / "queue.db", queue="orders")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")
    with pytest.raises(ConfigurationError, match=r"name a queue in it: sqlite:///shop\.db"):
        SqliteConnector(tmp_path / "shop.db")


def test_appended_in_a_transaction_they_are_there_if_and_only_if_it_commits(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with SqliteConnector(tmp_path / "shop.db", queue="orders") as queue:
        with engine.connect() as connection:
            append_in(connection, "orders", encode_all([Transaction(payload="never")]))
            connection.rollback()
            append_in(connection, "orders", encode_all([Transaction(payload="kept")]))
            append_in(connection, "orders", encode_all([Transaction(payload="due")]), time.time() - 5)
            append_in(connection, "orders", encode_all([Transaction(payload="later")]), time.time() + 3600)
            connection.commit()
        assert sorted(map(str, payloads(queue))) == ["due", "kept"]
        assert queue.counts() == {"ready": 0, "leased": 2, "delayed": 1, "dead": 0}
    engine.dispose()


def test_it_balances_and_a_message_that_somebody_removed_is_missed(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/shop.db"
    shop = Shop(f"{database}?queue=orders&on_failure=dead_letter", database)
    assert shop.of_app().exit_code == 0
    shop.send(order(1), order("x"), order(3))
    shop.consume(limit=2)
    code, struck = shop.balanced()
    assert code == 0
    assert numbers(struck) == {"appended": 3, "applied": 1, "duplicate": 0, "pending": 1, "dead": 1}
    shop.execute("DELETE FROM onceward_queue_orders_messages")
    code, struck = shop.balanced()
    assert code == 1
    assert struck["problems"][0].startswith("1 message is missing")
