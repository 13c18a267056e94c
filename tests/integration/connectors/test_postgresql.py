"""The PostgreSQL queue beyond the suite: its tables, what a claim costs, waiting, other people's transactions."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from onceward.connectors.codec import encode_all
from onceward.connectors.postgresql import (
    AsyncPostgreSqlConnector,
    PostgreSqlConnector,
    append_in,
    creation_script,
    statements,
    store,
)
from onceward.errors import ConfigurationError
from onceward.task import source as engine_source
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.task.mixins.policies import ConsumerLoopPolicy, ConsumerPolicy
from onceward.transaction import Settlement, Transaction, Verdict
from tests.support.deaf_pooler import deaf_pooler
from tests.support.schema import Schema, new_schema
from tests.support.wait import until
from tests.support.world import World


@pytest.fixture
def schema(postgres_url: str) -> Iterator[Schema]:
    with new_schema(postgres_url) as made:
        yield made


@pytest.fixture
def queue(schema: Schema) -> Iterator[PostgreSqlConnector]:
    with PostgreSqlConnector(schema.plain_url, "orders") as made:
        yield made


@pytest.fixture
def engine(schema: Schema) -> Iterator[Engine]:
    made = create_engine(schema.url, connect_args=schema.connect_args)
    yield made
    made.dispose()


def payloads(queue: Any, size: int = 100) -> list[Any]:
    return [each.payload for each in queue.fetch_transactions(size)]


def numbered(count: int) -> list[Transaction]:
    return [Transaction(payload=number) for number in range(count)]


# ── its tables ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PG-03")
def test_connectors_that_start_at_once_create_the_tables_once(schema: Schema) -> None:
    def begin(number: int) -> dict[str, int]:
        with PostgreSqlConnector(schema.plain_url, "orders") as queue:
            queue.dispatch_transactions(numbered(1))
            return queue.counts()

    with ThreadPoolExecutor(6) as threads:
        assert len(list(threads.map(begin, range(6)))) == 6
    assert begin(7)["ready"] == 7


@pytest.mark.req("PG-03")
def test_a_role_that_may_not_create_tables_is_shown_what_its_owner_runs(schema: Schema) -> None:
    role = f"role_{schema.name}"
    url = make_url(schema.plain_url).set(username=role)
    schema.execute(f"CREATE ROLE {role} LOGIN")
    try:
        schema.execute(f"GRANT USAGE ON SCHEMA {schema.name} TO {role}")
        with PostgreSqlConnector(url, "orders") as queue:
            with pytest.raises(ConfigurationError, match=r"may not create them .*creation_script.*psql"):
                queue.fetch_transactions(1)
            with closing(psycopg.connect(schema.plain_url, autocommit=True)) as owner:
                owner.execute(creation_script(role).encode())
            queue.dispatch_transactions([*numbered(2), Transaction(payload="bad")])
            assert payloads(queue, 1) == [0]
            [bad] = [each for each in queue.fetch_transactions(10) if each.payload == "bad"]
            queue.settle_transactions([Settlement(bad, Verdict.FAILED, delay=0.0)])
            queue._rows._untidied = store.TIDY_EVERY
            queue._rows.tidy()
            assert queue.counts() == {"ready": 0, "leased": 2, "delayed": 1, "dead": 0}
    finally:
        schema.execute(f"DROP OWNED BY {role}")
        schema.execute(f"DROP ROLE {role}")


@pytest.mark.req("PG-03")
def test_messages_that_come_due_while_they_are_counted_are_counted(
    schema: Schema, queue: PostgreSqlConnector, engine: Engine
) -> None:
    number = 20_000
    queue.counts()  # creates the tables
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO onceward_queue_delayed (seq, visible_at, enqueued_at, queue, body) SELECT each, "
                "extract(epoch FROM clock_timestamp()) + 0.1 + each * 0.00005, 0, 'orders', '' "
                "FROM generate_series(1, :number) AS each"
            ),
            {"number": number},
        )
    while (counts := queue.counts())["delayed"]:
        assert counts["ready"] + counts["delayed"] == number
    assert counts["ready"] == number


@pytest.mark.req("PG-03")
def test_tables_of_a_newer_version_are_refused(schema: Schema, queue: PostgreSqlConnector) -> None:
    queue.counts()
    schema.execute(f"UPDATE {schema.name}.onceward_queue_schema SET version = 99")
    with (
        PostgreSqlConnector(schema.plain_url, "orders") as newer,
        pytest.raises(ConfigurationError, match="upgrade onceward"),
    ):
        newer.fetch_transactions(1)


def test_queues_of_one_database_know_nothing_of_each_other(
    schema: Schema, queue: PostgreSqlConnector
) -> None:
    with PostgreSqlConnector(schema.plain_url, "returns") as other:
        queue.dispatch_transactions(numbered(3))
        assert payloads(other) == []
        assert payloads(queue) == [0, 1, 2]


def test_ids_and_errors_that_postgresql_cannot_store_are_kept_readably(queue: PostgreSqlConnector) -> None:
    queue.dispatch_transactions([Transaction("nul \0 and half \ud83d".encode("utf-8", "replace").decode())])
    error = TransactionException("broken at \0", ExceptionCategory.BUSINESS)
    [fetched] = queue.fetch_transactions(1)
    queue.settle_transactions([Settlement(fetched, Verdict.FAILED, error)])
    [letter] = queue.dead_letters()
    assert letter.transaction == fetched
    assert letter.error is not None
    assert "broken at \\x00" in letter.error


# ── claims ──────────────────────────────────────────────────────────────────────────────────────────────


CLAIM_TODAY = "onceward_queue_claim(text, integer, bigint, double precision, bigint)"
EARLIER_CLAIM = """
    CREATE FUNCTION {schema}.onceward_queue_claim(
        given_queue text, given_limit integer, given_token bigint, given_lease double precision
    ) RETURNS TABLE (found_seq bigint, found_body bytea, found_due double precision) LANGUAGE sql AS
        $$ SELECT 1::bigint, NULL::bytea, 0::double precision $$
"""


def become_older(schema: Schema) -> None:
    """Its queues have the function of an earlier onceward."""
    schema.execute(f"DROP FUNCTION {schema.name}.{CLAIM_TODAY}")
    schema.execute(EARLIER_CLAIM.format(schema=schema.name))


@pytest.mark.req("PG-03")
def test_queues_of_an_earlier_onceward_get_what_they_lack_and_keep_their_messages(
    schema: Schema, queue: PostgreSqlConnector
) -> None:
    queue.dispatch_transactions(numbered(3))
    assert payloads(queue, 1) == [0]
    become_older(schema)
    with PostgreSqlConnector(schema.plain_url, "orders") as later:
        assert later.counts() == {"ready": 2, "leased": 1, "delayed": 0, "dead": 0}
        assert later._rows.tables is not None
        assert later._rows.tables.claims_at_once
        assert payloads(later) == [1, 2]
        with PostgreSqlConnector(schema.plain_url, "orders") as another:
            another.dispatch_transactions(numbered(1))
            assert payloads(another) == [0]
    functions = schema.execute(
        "SELECT pronargs FROM pg_proc WHERE proname = 'onceward_queue_claim' "
        f"AND pronamespace = '{schema.name}'::regnamespace ORDER BY 1"
    )
    assert [tuple(each) for each in functions] == [(4,), (5,)], "a process of the earlier one goes on"


@pytest.mark.req("PG-03")
def test_a_role_that_may_create_nothing_uses_queues_of_an_earlier_onceward_as_they_are(
    schema: Schema, queue: PostgreSqlConnector
) -> None:
    queue.dispatch_transactions(numbered(2))
    become_older(schema)
    role = f"user_{schema.name}"
    schema.execute(f"CREATE ROLE {role} LOGIN")
    schema.execute(f"GRANT USAGE ON SCHEMA {schema.name} TO {role}")
    schema.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema.name} TO {role}")
    try:
        url = make_url(schema.plain_url).set(username=role).render_as_string(hide_password=False)
        with PostgreSqlConnector(url, "orders") as other:
            assert payloads(other) == [0, 1]
            assert other._rows.tables is not None
            assert not other._rows.tables.is_current
    finally:
        schema.execute(f"DROP OWNED BY {role}")
        schema.execute(f"DROP ROLE {role}")


@pytest.mark.req("PG-04")
def test_a_claim_of_new_messages_does_not_wait_for_the_disk_and_others_do(
    queue: PostgreSqlConnector, engine: Engine
) -> None:
    queue.dispatch_transactions(numbered(1))
    with engine.connect() as connection:
        assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == "on"
        connection.exec_driver_sql(
            queue._rows.statement(statements.CLAIM), ("orders", 5, 1, 60.0, -1)
        ).close()
        assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == "off"
        connection.rollback()
        assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == "on"
    assert payloads(queue) == [0]
    assert queue._rows._call_alone("SHOW synchronous_commit", ()) == [("on",)]


@pytest.mark.req("PG-04")
def test_a_message_whose_transaction_commits_late_is_not_skipped(
    queue: PostgreSqlConnector, engine: Engine
) -> None:
    queue.counts()
    with engine.connect() as late:
        append_in(late, "orders", encode_all([Transaction(payload="late")]))
        queue.dispatch_transactions([Transaction(payload="soon")])
        assert payloads(queue) == ["soon"]
        late.commit()
    assert payloads(queue) == ["late"]


@pytest.mark.req("PG-04")
def test_a_claim_reads_no_more_pages_with_a_backlog_waiting_messages_and_dead_ones(
    schema: Schema, queue: PostgreSqlConnector, engine: Engine
) -> None:
    """Counted in pages, not in time. The plan was made when the tables were empty, and is kept."""
    bodies = encode_all(numbered(1))

    def pages() -> int:
        """What a claim of ten reads, in the connector's own words."""
        with queue._rows.transaction(10.0):
            plan = queue._rows._run(
                "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statements.READY, ("orders", -1, 10)
            ).scalar_one()
        found: dict[str, Any] = plan[0]["Plan"]
        return int(found["Shared Hit Blocks"] + found["Shared Read Blocks"])

    queue.dispatch_transactions(numbered(20))
    for _ in range(8):  # psycopg and PostgreSQL keep its plan from now on
        payloads(queue, 1)
    before = pages()
    with engine.begin() as connection:
        append_in(connection, "orders", bodies * 5_000, time.time() + 3600)
        append_in(connection, "orders", bodies * 10_000)
    for _ in range(5):  # leaves dead rows at the beginning
        queue.settle_transactions(
            [Settlement(each, Verdict.DONE) for each in queue.fetch_transactions(1_000)]
        )
    pages()  # the index notes what is dead when it is read, and passes it in pages of hundreds until a vacuum
    assert pages() <= before + 5_000 // 100, "the whole table has many hundreds"


READ_ROWS = """
    SELECT sum(pg_stat_get_xact_tuples_returned(c.oid)) FROM pg_class c
    WHERE c.relnamespace = current_schema::regnamespace AND c.relname ~ '^onceward_queue_(messages|delayed|turns)'
"""
"""Rows and entries of indexes that this session has read."""


@pytest.mark.req("PG-04")
def test_lines_are_kept_without_reading_rows_of_others_whatever_the_statistics_say(
    schema: Schema, queue: PostgreSqlConnector, engine: Engine
) -> None:
    """An analysis met the tables when they were empty, and had pages."""
    rows, bodies, tables = queue._rows, encode_all(numbered(1)), ("messages", "delayed", "turns")
    queue.counts()
    with rows.transaction(5.0):
        rows.begin_lines(False)

    def fill() -> None:
        """3,000 messages are the first of their lines, and as many wait behind them."""
        with engine.begin() as connection:
            append_in(connection, "orders", bodies * 3_000)
            append_in(connection, "orders", bodies * 3_000, float("inf"))
            for table, is_first in (("messages", "true"), ("delayed", "false")):
                connection.exec_driver_sql(
                    f"""INSERT INTO onceward_queue_turns (queue, seq, order_key, is_first)
                    SELECT queue, seq, row_number() OVER (ORDER BY seq), {is_first} FROM onceward_queue_{table}"""
                )

    for table in tables:
        schema.execute(f"ALTER TABLE {schema.name}.onceward_queue_{table} SET (autovacuum_enabled = false)")
    fill()
    for table in tables:
        schema.execute(f"DELETE FROM {schema.name}.onceward_queue_{table}")
        schema.execute(f"ANALYZE {schema.name}.onceward_queue_{table}")
    fill()
    queue.dispatch_transactions(numbered(1))
    schema.execute(
        f"""DELETE FROM {schema.name}.onceward_queue_messages
        WHERE seq = (SELECT min(seq) FROM {schema.name}.onceward_queue_turns)"""
    )

    def read(call: Callable[[], Any]) -> tuple[Any, int]:
        with rows.transaction(5.0):
            before = rows._run(READ_ROWS).scalar_one()
            found = call()
            return found, int(rows._run(READ_ROWS).scalar_one() - before)

    first, of_first = read(lambda: rows._ready(-1, 10))
    newcomers, of_newcomers = read(lambda: rows.newcomers(0.0, 10))
    _, of_advance = read(rows.advance_lines)
    assert (len(first), len(newcomers)) == (10, 1)
    assert of_first < 4_000, "of dead ones, too"
    assert of_newcomers < 40_000, "all messages, and the place of each"
    assert of_advance < 40_000, "all first places, and the message of each; a join would read millions"


@pytest.mark.req("PG-04")
@pytest.mark.parametrize("older", [False, True], ids=["today", "earlier"])
def test_messages_that_come_due_are_found_without_passing_all_that_wait(schema: Schema, older: bool) -> None:
    """Also on queues of an earlier onceward, and after an analysis of the table when it was empty."""
    with PostgreSqlConnector(schema.plain_url, "orders") as queue:
        queue.counts()
    if older:
        become_older(schema)
        schema.execute(
            f"""CREATE OR REPLACE FUNCTION {schema.name}.onceward_queue_move_due(
                given_queue text, given_limit integer) RETURNS integer LANGUAGE sql AS 'SELECT 0'"""
        )
    delayed = f"{schema.name}.onceward_queue_delayed"
    fill = f"""
        INSERT INTO {delayed} (queue, seq, visible_at, enqueued_at, body)
        SELECT 'orders', n, CASE WHEN n > 5000 THEN 1 ELSE 4e9 END, 1, '' FROM generate_series(1, 5020) AS n
    """
    for statement in (
        f"ALTER TABLE {delayed} SET (autovacuum_enabled = false)",
        fill,
        f"DELETE FROM {delayed}",
        f"ANALYZE {delayed}",
        fill,
    ):
        schema.execute(statement)
    with PostgreSqlConnector(schema.plain_url, "orders") as queue, queue._rows.transaction(5.0):
        before = queue._rows._run(READ_ROWS).scalar_one()
        assert queue._rows._move_due(100) == 20
        assert queue._rows._run(READ_ROWS).scalar_one() - before < 500


@pytest.mark.req("PG-04")
def test_a_row_inserted_by_hand_with_the_number_of_another_message_does_not_block_the_queue(
    schema: Schema, queue: PostgreSqlConnector
) -> None:
    queue.dispatch_transactions(numbered(2))
    schema.execute(
        f"""
        INSERT INTO {schema.name}.onceward_queue_delayed (queue, seq, visible_at, enqueued_at, body)
        SELECT queue, seq, 0, 0, body FROM {schema.name}.onceward_queue_messages ORDER BY seq LIMIT 1
        """
    )
    assert payloads(queue) == [0, 1, 0]


@pytest.mark.req("PG-04")
def test_claiming_extending_and_removing_read_no_rows_but_their_own(
    queue: PostgreSqlConnector, engine: Engine
) -> None:
    """Also after the statistics say that the tables are empty, as they are most of the time."""
    rows, bodies = queue._rows, encode_all(numbered(1))
    queue.counts()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE onceward_queue_messages, onceward_queue_delayed"))
    with engine.begin() as connection:
        append_in(connection, "orders", bodies * 2_000)
        append_in(connection, "orders", bodies * 5, 1.0)
        append_in(connection, "orders", bodies * 2_000, time.time() + 3600)
    with rows.transaction(10.0):
        taken = rows.available(0.0, 10)
        rows.lease(taken, 7, 60.0)
        held = [(row[0], 7) for row in taken]
        assert rows.extend(held, 60.0) == []
        assert rows.remove(held, numbered(10)) == []
        query = "SELECT sum(idx_tup_fetch + seq_tup_read) FROM pg_stat_xact_user_tables WHERE relname LIKE 'onceward%%'"
        assert rows._run(query).scalar_one() < 200


@pytest.mark.req("PG-04")
def test_after_a_slow_claim_the_next_continue_where_it_ended_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, queue: PostgreSqlConnector
) -> None:
    monkeypatch.setattr(store, "SLOW", -1.0)
    monkeypatch.setattr(store, "SELDOM", 1e9)
    queue.dispatch_transactions(numbered(10))
    first = queue.fetch_transactions(2)
    assert payloads(queue, 2) == [2, 3]
    queue.settle_transactions([Settlement(each, Verdict.RETURNED) for each in first])
    assert payloads(queue, 2) == [0, 1], "what came back here is looked for at once"
    assert payloads(queue, 4) == [4, 5, 6, 7]
    assert payloads(queue, 100) == [8, 9]
    assert payloads(queue, 1) == []


@pytest.mark.req("PG-07")
def test_a_worker_that_is_frozen_while_it_claims_keeps_no_messages_from_others(
    schema: Schema, queue: PostgreSqlConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "BEGIN", statements.BEGIN.replace("'10000'", "'300'"))
    queue.dispatch_transactions(numbered(1))
    [again] = queue.fetch_transactions(1)
    queue.settle_transactions(
        [Settlement(again, Verdict.FAILED, delay=0.0)]
    )  # the next claim is a transaction
    frozen, thawed = threading.Event(), threading.Event()
    lease = queue._rows.lease

    def freeze(*given: Any) -> None:
        frozen.set()
        assert thawed.wait(60)
        lease(*given)

    with (
        PostgreSqlConnector(schema.plain_url, "orders") as other,
        ThreadPoolExecutor() as threads,
    ):
        monkeypatch.setattr(queue._rows, "lease", freeze)
        claim = threads.submit(until, lambda: queue.fetch_transactions(1))
        assert frozen.wait(60)
        assert payloads(other) == [], "its row is locked"
        assert until(lambda: payloads(other)) == [0]
        thawed.set()
        with pytest.raises(DBAPIError, match="idle-in-transaction") as cut_off:
            claim.result(60)
        assert cut_off.value.connection_invalidated
        monkeypatch.undo()
        queue.dispatch_transactions(numbered(2))
        assert payloads(queue) == [0, 1], "it goes on with another connection"


@pytest.mark.req("PG-04")
def test_the_clock_of_a_worker_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, queue: PostgreSqlConnector
) -> None:
    queue.dispatch_transactions(numbered(1))
    assert payloads(queue) == [0]
    true_time = time.time
    for skew in (-300.0, 300.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: true_time() + skew)
        assert payloads(queue) == []
    assert queue.counts() == {"ready": 0, "leased": 1, "delayed": 0, "dead": 0}


def test_a_child_process_uses_connections_of_its_own(queue: PostgreSqlConnector) -> None:
    queue.dispatch_transactions(numbered(2))
    assert payloads(queue, 1) == [0]
    child = os.fork()
    if not child:
        os._exit(payloads(queue, 1) != [1])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert queue.counts()["leased"] == 2


def test_a_child_process_sends_on_a_connection_of_its_own(queue: PostgreSqlConnector) -> None:
    queue.dispatch_transactions(numbered(1))
    queue.dispatch_transactions(numbered(1))
    child = os.fork()
    if not child:
        queue.dispatch_transactions(numbered(1))
        queue.dispatch_transactions(numbered(1))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    queue.dispatch_transactions(numbered(1))
    assert queue.counts()["ready"] == 5


# ── sending ─────────────────────────────────────────────────────────────────────────────────────────────


def test_threads_that_send_at_once_lose_nothing(queue: PostgreSqlConnector) -> None:
    def send(_: int) -> None:
        for each in numbered(20):
            queue.dispatch_transactions([each])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    assert queue.counts()["ready"] == 160


def test_a_send_that_fails_shows_no_message(queue: PostgreSqlConnector, engine: Engine) -> None:
    queue.dispatch_transactions(numbered(1))
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE onceward_queue_log"))
    with pytest.raises(ProgrammingError) as caught:
        queue.dispatch_transactions([Transaction(payload="4111-1111")])
    assert "4111" not in f"{caught.value} {caught.value.__cause__!r}"


def test_a_connection_that_the_server_has_ended_is_not_used_to_send(
    queue: PostgreSqlConnector, engine: Engine
) -> None:
    queue.dispatch_transactions(numbered(1))
    queue.dispatch_transactions(numbered(1))
    end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'onceward-queue'"
    with engine.begin() as connection:
        connection.execute(text(end))
    queue.dispatch_transactions(numbered(1))
    assert queue.counts()["ready"] == 3


# ── other people's transactions ─────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PG-10")
def test_appended_in_a_transaction_they_are_there_if_and_only_if_it_commits(
    queue: PostgreSqlConnector, engine: Engine
) -> None:
    queue.counts()
    with engine.connect() as connection:
        append_in(connection, "orders", encode_all(numbered(2)))
        connection.rollback()
        append_in(connection, "orders", encode_all([Transaction(payload="kept")]))
        append_in(connection, "orders", encode_all([Transaction(payload="due")]), time.time() - 1)
        append_in(connection, "orders", encode_all([Transaction(payload="later")]), time.time() + 3600)
        append_in(connection, "orders", [])
        assert payloads(queue) == []
        connection.commit()
    assert sorted(payloads(queue)) == ["due", "kept"]
    assert queue.counts() == {"ready": 0, "leased": 2, "delayed": 1, "dead": 0}


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────


def waiters(engine: Engine) -> int:
    """How many connectors wait for messages."""
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
    with engine.connect() as connection:
        return int(connection.execute(text(query)).scalar_one())


@contextmanager
def consuming(world: World, url: Any) -> Iterator[list[Any]]:
    """Consume from a queue in another thread, until the end of the block. Yields the payloads so far."""
    kind: Any = AsyncPostgreSqlConnector if world.asynchronous else PostgreSqlConnector
    seen: list[Any] = []
    source = kind(url, "orders")
    task = world.consumer(lambda transaction: seen.append(transaction.payload), source=source)
    loop = ConsumerLoopPolicy(streaming=True)

    def consume() -> None:
        world.run(task.consume_transactions, ConsumerPolicy(loop=loop))

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield seen
    finally:
        task.stop()
        thread.join(20)
        assert not thread.is_alive(), "the stop did not end the wait"
        world.run(source.close_async if world.asynchronous else source.close)


@pytest.mark.req("PG-05")
def test_a_commit_ends_the_wait_for_messages_and_a_stop_does_too(
    world: World, monkeypatch: pytest.MonkeyPatch, schema: Schema, queue: PostgreSqlConnector, engine: Engine
) -> None:
    monkeypatch.setattr(engine_source, "LONGEST_WAIT", 300.0)  # so nothing else ends it
    queue.counts()
    with consuming(world, schema.plain_url) as seen:
        for number in range(3):
            until(lambda: waiters(engine) == 1)
            time.sleep(0.1)
            queue.dispatch_transactions([Transaction(payload=number)])
            until(lambda number=number: seen[-1:] == [number], 30)  # type: ignore[misc]
        until(lambda: waiters(engine) == 1)
    until(lambda: waiters(engine) == 0)  # the server notices that the connection is closed


@pytest.mark.req("PG-05")
def test_a_message_that_waits_for_its_time_ends_the_wait_when_it_comes(
    world: World, monkeypatch: pytest.MonkeyPatch, schema: Schema, queue: PostgreSqlConnector, engine: Engine
) -> None:
    monkeypatch.setattr(engine_source, "LONGEST_WAIT", 300.0)
    queue.counts()
    with engine.begin() as connection:
        append_in(connection, "orders", encode_all([Transaction(payload="due")]), time.time() + 1.0)
    with consuming(world, schema.plain_url) as seen:
        until(lambda: seen == ["due"], 30)


@pytest.mark.req("PG-05")
def test_behind_a_pooler_in_transaction_mode_messages_are_found_by_polling_and_the_log_says_so_once(
    world: World, schema: Schema, queue: PostgreSqlConnector, caplog: pytest.LogCaptureFixture
) -> None:
    url = make_url(schema.plain_url)
    server = Path(str(url.query["host"])) / ".s.PGSQL.5432"
    queue.counts()
    with deaf_pooler(server) as port:
        options = {"options": url.query["options"], "sslmode": "disable"}
        with consuming(world, url.set(host="127.0.0.1", port=port, query=options)) as seen:
            until(lambda: "LISTEN does not work here" in caplog.text)
            for number in range(3):
                queue.dispatch_transactions([Transaction(payload=number)])
                until(lambda number=number: seen[-1:] == [number])  # type: ignore[misc]
    assert caplog.text.count("LISTEN does not work here") == 1
