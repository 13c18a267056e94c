"""What weakens the database of an inbox, as `onceward explain` finds it on real databases."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.connectors.reports import Durability, SourceFacts, Survives
from onceward.connectors.urls import Address
from onceward.inbox import Inbox
from onceward.inspection.database_doubts import doubt_postgresql, doubt_sqlite, sqlite_file
from onceward.inspection.guarantees import Facts, WeakLink, judge
from onceward.inspection.probes import open_database
from onceward.testing.servers import redis_server
from onceward.transaction import Transaction
from tests.support.disk import disk
from tests.support.inbox.databases import schema
from tests.support.schema import Schema
from tests.support.wait import until

__all__ = ["disk", "schema"]

pytestmark = [pytest.mark.req("CC-123"), pytest.mark.usefixtures("disk")]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory&cache=shared&uri=true",
        "sqlite:///file::memory:?cache=shared&uri=true",
        "sqlite:///file:/x?vfs=memdb&uri=true",
    ],
)
def test_a_database_in_memory_is_none_in_a_file(url: str) -> None:
    assert sqlite_file(make_url(url)) is None


@pytest.mark.parametrize(
    ("options", "strength", "why"),
    [
        ("nolock=1", "may lose", "nolock=1: two connections may write at the same time"),
        ("mode=ro", "unknown", "only for reading: no event can be done"),
        ("immutable=1", "unknown", "only for reading: no event can be done"),
        ("vfs=unix-none", "unknown", "vfs=unix-none: whether it locks"),
    ],
)
def test_settings_that_weaken_sqlite_are_found(tmp_path: Path, options: str, strength: str, why: str) -> None:
    url = make_url(f"sqlite:///file:{tmp_path}/shop.db?{options}&uri=true")
    assert sqlite_file(url) == tmp_path / "shop.db"
    [doubt] = doubt_sqlite(url)
    assert str(doubt.strength) == strength
    assert why in doubt.why


def test_an_ordinary_file_leaves_no_doubt_also_as_a_uri(tmp_path: Path) -> None:
    for name in (f"{tmp_path}/shop.db", f"file:{tmp_path}/shop.db?uri=true"):
        assert list(doubt_sqlite(make_url(f"sqlite:///{name}"))) == []


def doubts(url: str) -> list[WeakLink]:
    with open_database(url) as connection:
        assert connection is not None
        return list(doubt_postgresql(connection))


def test_tables_that_postgresql_empties_after_a_crash_are_named_and_so_are_partitions(schema: Schema) -> None:
    engine = create_engine(schema.url, connect_args=schema.connect_args)
    Inbox(engine).migrate()
    engine.dispose()
    assert doubts(schema.plain_url) == []
    schema.execute(f"ALTER TABLE {schema.name}.onceward_dead_letters SET UNLOGGED")
    [letters] = doubts(schema.plain_url)
    assert str(letters.strength) == "may lose"
    assert letters.why.startswith(
        "unlogged tables: onceward_dead_letters; PostgreSQL empties them after a crash, and forgets the dead letters"
    )
    schema.execute(f"ALTER TABLE {schema.name}.onceward_dead_letters SET LOGGED")
    schema.execute(
        f"CREATE UNLOGGED TABLE {schema.name}.mine PARTITION OF {schema.name}.onceward_dedup FOR VALUES FROM (7) TO (8)"
    )
    [partition] = doubts(schema.plain_url)
    assert partition.why.startswith("unlogged tables: mine;")
    assert partition.why.endswith("forgets which events are done")


def test_a_queue_with_unlogged_tables_is_not_durable(schema: Schema) -> None:
    source = Address(f"{schema.plain_url}{'&' if '?' in schema.plain_url else '?'}queue=orders")
    with PostgreSqlConnector(schema.plain_url, "orders") as queue:
        queue.dispatch_transactions([Transaction("a")])
    assert source.facts().hazards == ()
    schema.execute(f"ALTER TABLE {schema.name}.onceward_queue_messages SET UNLOGGED")
    [hazard] = source.facts().hazards
    assert hazard.why.startswith("the queue has unlogged tables: onceward_queue_messages;")


@pytest.mark.req("CC-164")
def test_unlogged_tables_of_the_user_are_in_the_headline(schema: Schema) -> None:
    schema.execute(f"CREATE UNLOGGED TABLE {schema.name}.bills (id TEXT)")
    [bills] = doubts(schema.plain_url)
    assert bills.why.startswith("your unlogged tables: bills;")
    proven = Facts(
        source=SourceFacts(durability=Durability(Survives.MACHINE_CRASH, "on a disk"), redelivers=True),
        mode="transactional",
        database="postgresql",
        proven=True,
        database_doubts=(bills,),
    )
    assert judge(proven).headline == "effects once: transactional, proven, but not in unlogged tables"


@pytest.mark.req("CC-164")
def test_a_source_that_refuses_to_write_is_unknown(
    postgres_url: str,
) -> None:
    plain = postgres_url.replace("postgresql+psycopg://", "postgresql://", 1)
    more = "options=-cdefault_transaction_read_only%3Don&queue=orders"
    in_postgresql = Address(f"{plain}{'&' if '?' in plain else '?'}{more}").facts()
    with redis_server(durable=True) as server:
        with Redis.from_url(server.url) as redis:
            redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        in_redis = Address(f"{server.url.removesuffix('/0')}/orders").facts()
    for facts in (in_postgresql, in_redis):
        assert facts.durability is not None
        assert (facts.durability.survives, facts.durability.label) == (None, "cannot be written")


@pytest.mark.req("CC-164")
def test_a_standby_that_commits_do_not_wait_for_is_found(postgres_url: str) -> None:
    plain = postgres_url.replace("postgresql+psycopg://", "postgresql://", 1)
    url = f"{plain}{'&' if '?' in plain else '?'}options=-csynchronous_commit%3Dlocal"
    assert doubts(url) == []
    engine = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        try:
            connection.exec_driver_sql("SET synchronous_commit = local")  # nobody answers as the standby
            connection.exec_driver_sql("ALTER SYSTEM SET synchronous_standby_names = 'other'")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
            until(lambda: [each for each in doubts(url) if "does not wait for the standby" in each.why])
            source = Address(f"{url}&queue=orders").facts().durability
            assert source is not None
            assert source.survives is Survives.PROCESS_CRASH
        finally:
            connection.exec_driver_sql("ALTER SYSTEM RESET synchronous_standby_names")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
    until(lambda: doubts(url) == [])
    engine.dispose()


def test_a_server_that_does_not_write_or_may_break_pages_is_found(postgres_url: str) -> None:
    plain = postgres_url.replace("postgresql+psycopg://", "postgresql://", 1)
    url = f"{plain}{'&' if '?' in plain else '?'}options=-cdefault_transaction_read_only%3Don"
    [refuses] = doubts(url)
    assert refuses.label == "database cannot be written"
    engine = create_engine(
        plain.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        try:
            connection.exec_driver_sql("ALTER SYSTEM SET full_page_writes = off")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
            until(lambda: [each for each in doubts(plain) if "full_page_writes=off" in each.why])
            queue = Address(f"{plain}{'&' if '?' in plain else '?'}queue=orders")
            assert "full_page_writes=off" in queue.facts().hazards[0].why
        finally:
            connection.exec_driver_sql("ALTER SYSTEM RESET full_page_writes")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
    until(lambda: doubts(plain) == [])
    engine.dispose()
