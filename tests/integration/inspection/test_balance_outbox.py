"""`onceward balance` across the outbox: every attempt to make it lie."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from onceward.cli.main import app as commands
from tests.support.chain import Chain, chain_to
from tests.support.schema import new_schema


@pytest.fixture(params=["sqlite", "postgresql"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chain]:
    """Its outbox is in this database, its sink a queue in a file."""
    if request.param == "sqlite":
        with chain_to("sqlite", tmp_path, request) as made:
            yield made
        return
    with (
        new_schema(request.getfixturevalue("postgres_url")) as schema,
        chain_to("sqlite", tmp_path, request, schema.plain_url) as made,
    ):
        yield made


def balance(chain: Chain, *options: str) -> Result:
    sys.modules["shop_of_this_test"] = chain  # type: ignore[assignment]  # a module is what has an `app`
    try:
        arguments = ["balance", "shop_of_this_test:app", *options]
        return CliRunner().invoke(commands, arguments, env={"COLUMNS": "250", "NO_COLOR": "1"})
    finally:
        del sys.modules["shop_of_this_test"]


@pytest.mark.req("OB-20")
def test_the_command_has_a_line_for_each_target_beside_the_consumers(chain: Chain) -> None:
    chain.send(1, 2)
    chain.relay()
    chain.consume()
    chain.send(3)
    result = balance(chain)
    assert result.exit_code == 0, result.output
    assert "outbox → ship" in result.stdout
    assert "It holds for 2 of 2 consumers and targets." in result.stdout
    only = balance(chain, "--consumer", "outbox-relay")
    assert "It holds: 3 committed = 2 published + 1 waiting." in only.stdout


@pytest.mark.req("OB-20")
def test_a_canceled_and_a_dead_message_are_accounted_for(chain: Chain) -> None:
    (one, _) = chain.send(1, 2, delay=3600)
    with chain.engine.begin() as connection:
        assert chain.app.outbox(connection).cancel(one)
        assert not chain.app.outbox(connection).cancel("unknown")
    chain.execute("UPDATE onceward_outbox SET state = 'dead', ended_at = 1")
    found = chain.balance()
    assert (found.verdict, found.appended, found.dead, dict(found.dropped)) == (
        "holds",
        2,
        1,
        {"canceled": 1},
    )


@pytest.mark.req("OB-20")
def test_a_cancel_that_rolls_back_counts_nothing(chain: Chain) -> None:
    (one,) = chain.send(1, delay=3600)
    with chain.engine.connect() as connection:
        assert chain.app.outbox(connection).cancel(one)
        connection.rollback()
    found = chain.balance()
    assert (found.verdict, found.pending, dict(found.dropped)) == ("holds", 1, {})


@pytest.mark.req("OB-20")
def test_a_waiting_row_that_somebody_deletes_is_missing(chain: Chain) -> None:
    chain.send(1, 2)
    chain.execute("DELETE FROM onceward_outbox WHERE seq = (SELECT min(seq) FROM onceward_outbox)")
    found = chain.balance()
    assert found.verdict == "does not hold"
    assert "1 message is missing: removed from the outbox before" in found.problems[0]
    assert balance(chain).exit_code == 1


@pytest.mark.req("OB-20")
def test_an_outbox_of_an_older_backup_does_not_balance(chain: Chain) -> None:
    """Only the table is restored, with triggers off, as `pg_restore --clean` or `.restore` of one table does it."""
    chain.send(1)
    chain.execute("CREATE TABLE backup AS SELECT * FROM onceward_outbox")
    chain.send(2, 3)
    chain.relay()
    is_sqlite = chain.engine.dialect.name == "sqlite"
    off = "DROP TRIGGER onceward_outbox_counts_removed" + ("" if is_sqlite else " ON onceward_outbox")
    chain.execute(off, "DELETE FROM onceward_outbox")
    overriding = "" if is_sqlite else "OVERRIDING SYSTEM VALUE "
    chain.execute(f"INSERT INTO onceward_outbox {overriding}SELECT * FROM backup")
    found = chain.balance()
    assert found.verdict == "does not hold"
    assert "restored from an older backup" in found.problems[0]


@pytest.mark.req("OB-20")
def test_a_row_that_is_marked_as_published_by_hand_is_not(chain: Chain) -> None:
    chain.send(1)
    chain.execute("UPDATE onceward_outbox SET state = 'published', ended_at = 1")
    found = chain.balance()
    assert found.verdict == "does not hold"
    assert any("no relay has published" in each for each in found.problems)
    assert any("published, but not at the sink" in each for each in found.problems)


@pytest.mark.req("OB-20")
def test_a_message_that_is_deleted_from_the_sink_is_missing(chain: Chain, tmp_path: Path) -> None:
    sent = chain.send(1, 2)
    chain.relay()
    with closing(sqlite3.connect(tmp_path / "ship.db")) as queue, queue:
        queue.execute("DELETE FROM messages WHERE rowid = (SELECT min(rowid) FROM messages)")
    found = chain.balance()
    assert found.verdict == "does not hold"
    assert found.missing == (sent[0],)
    assert any("missing at the sink" in each for each in found.problems)


@pytest.mark.req("OB-20")
def test_a_sink_that_is_new_again_does_not_balance(chain: Chain, tmp_path: Path) -> None:
    chain.send(1)
    chain.relay()
    (tmp_path / "ship.db").unlink()
    assert "published, but not at the sink" in chain.balance().problems[0]


@pytest.mark.req("OB-20")
def test_what_a_redis_stream_lost_is_found(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with chain_to("redis", tmp_path, request) as chain:
        (gone, _) = chain.send(1, 2)
        chain.relay()
        [consumer] = chain.app.consumers.values()
        stream = consumer.source.path.rpartition("/")[2]
        with Redis.from_url(request.getfixturevalue("redis_url")) as redis:
            [(first, _), _] = redis.xrange(stream)
            redis.xdel(stream, first)
        found = chain.balance()
        assert (found.verdict, found.missing) == ("does not hold", (gone,)), found
        with Redis.from_url(request.getfixturevalue("redis_url")) as redis:
            redis.delete(stream)
        assert chain.balance().verdict == "does not hold"


@pytest.mark.req("OB-20")
def test_what_cannot_be_determined_is_unknown(chain: Chain) -> None:
    with chain.engine.begin() as connection:
        chain.app.outbox(connection).send("redis://x/here", {"number": 1})
    chain.execute("UPDATE onceward_outbox SET target = 'memory://here'")
    result = balance(chain)
    assert result.exit_code == 3, result.output
    assert "visible only inside the process" in result.output
    chain.execute("UPDATE onceward_outbox SET target = 'consumer:gone'")
    assert "has no consumer 'gone'" in balance(chain).output
    chain.execute("UPDATE onceward_outbox SET target = 'consumer:ship'", "DROP TABLE onceward_outbox_tally")
    assert "run `onceward inbox migrate`" in balance(chain).output
