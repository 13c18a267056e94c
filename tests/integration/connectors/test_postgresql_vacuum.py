"""A PostgreSQL queue that many messages pass stays small, without waiting for autovacuum."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest
from sqlalchemy import URL, make_url

from onceward.connectors.postgresql import PostgreSqlConnector, creation_script, store, vacuum
from onceward.transaction import Settlement, Transaction, Verdict
from tests.support.schema import Schema, new_schema
from tests.support.wait import until

TABLE = "onceward_queue_messages"
ROUND = 2_000
"""Messages whose rows are more than a pile."""


@pytest.fixture(autouse=True)
def small_piles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "PILE", 1_500)


@pytest.fixture
def schema(postgres_url: str) -> Iterator[Schema]:
    with new_schema(postgres_url) as made:
        yield made


class Server:
    """What PostgreSQL knows of the table."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    def _ask(self, expression: str) -> int:
        query = f"SELECT {expression}::bigint FROM pg_stat_user_tables WHERE relid = '{TABLE}'::regclass"
        found = self.connection.execute(query.encode()).fetchone()
        assert found is not None
        return int(found[0])

    def dead(self) -> int:
        return self._ask("n_dead_tup")

    def vacuums(self) -> int:
        """Not those of autovacuum."""
        return self._ask("vacuum_count")

    def size(self) -> int:
        return self._ask("pg_total_relation_size(relid)")


@contextmanager
def server_of(schema: Schema) -> Iterator[Server]:
    with closing(psycopg.connect(schema.plain_url, autocommit=True)) as connection:
        yield Server(connection)


@contextmanager
def queue_of(url: str | URL) -> Iterator[PostgreSqlConnector]:
    with PostgreSqlConnector(url, "orders") as queue:
        yield queue


def pass_many(queue: PostgreSqlConnector, server: Server, number: int = ROUND) -> None:
    """Send them, take them and end them, until the server has counted the dead rows."""
    before = server.vacuums()
    for _ in range(number // 1000):
        queue.dispatch_transactions([Transaction(payload=each) for each in range(1000)])
        taken = queue.fetch_transactions(1000)
        assert len(taken) == 1000
        queue.settle_transactions([Settlement(each, Verdict.DONE) for each in taken])
    # A connection that does something else tells the server what it counted.
    until(lambda: queue.counts() and (server.dead() > vacuum.PILE or server.vacuums() > before))


def tidy(queue: PostgreSqlConnector) -> None:
    queue._rows._untidied = store.TIDY_EVERY
    assert queue.fetch_transactions(1) == []


@pytest.mark.req("PG-12")
def test_a_queue_that_many_messages_pass_does_not_grow(schema: Schema) -> None:
    with queue_of(schema.plain_url) as queue:
        queue.counts()
        with server_of(schema) as server:
            sizes = []
            for _ in range(5):
                pass_many(queue, server)
                queue._rows._vacuum._next_at = 0.0
                until(lambda: tidy(queue) or server.dead() < vacuum.PILE)
                sizes.append(server.size())
            assert server.vacuums()
            assert sizes[-1] < 1.3 * sizes[1], sizes


@pytest.mark.req("PG-12")
def test_a_role_that_does_not_own_the_tables_leaves_vacuums_alone(schema: Schema) -> None:
    role = f"role_{schema.name}"
    url = make_url(schema.plain_url).set(username=role)
    schema.execute(f"CREATE ROLE {role} LOGIN")
    try:
        schema.execute(f"GRANT USAGE ON SCHEMA {schema.name} TO {role}")
        with server_of(schema) as server, queue_of(url) as queue:
            server.connection.execute(creation_script(role).encode())
            pass_many(queue, server)
            tidy(queue)
            assert server.vacuums() == 0
    finally:
        schema.execute(f"DROP OWNED BY {role}")
        schema.execute(f"DROP ROLE {role}")


@pytest.mark.req("PG-12")
def test_a_vacuum_waits_for_no_lock(schema: Schema) -> None:
    with queue_of(schema.plain_url) as queue:
        queue.counts()
        with server_of(schema) as server, server_of(schema) as other:
            with other.connection.transaction():
                other.connection.execute(f"LOCK TABLE {TABLE} IN SHARE UPDATE EXCLUSIVE MODE".encode())
                pass_many(queue, server)
                tidy(queue)
                assert server.vacuums() == 0
            queue._rows._vacuum._next_at = 0.0
            tidy(queue)
            until(lambda: server.vacuums() == 1)


@pytest.mark.req("PG-12")
def test_a_vacuum_that_can_remove_nothing_is_not_repeated_at_once(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vacuum, "SELDOM", 1e9)
    with queue_of(schema.plain_url) as queue:
        queue.counts()
        with server_of(schema) as server, server_of(schema) as old, old.connection.transaction():
            old.connection.execute("SELECT txid_current()")
            for _ in range(2):
                pass_many(queue, server)
                tidy(queue)
            assert server.dead() > vacuum.PILE
            assert server.vacuums() <= 1


@pytest.mark.req("PG-12")
def test_a_vacuum_that_fails_stops_no_claim(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vacuum, "VACUUM", "SELECT 1 / 0 FROM {table}")
    with queue_of(schema.plain_url) as queue, caplog.at_level(logging.INFO, "onceward.connectors.postgresql"):
        queue.counts()
        with server_of(schema) as server:
            server.connection.execute(f"ALTER TABLE {TABLE} SET (autovacuum_enabled = false)".encode())
            pass_many(queue, server)
            queue.dispatch_transactions([Transaction(payload="next")])
            queue._rows._untidied = store.TIDY_EVERY
            assert [each.payload for each in queue.fetch_transactions(10)] == ["next"]
    assert "left to autovacuum: division by zero" in caplog.text
