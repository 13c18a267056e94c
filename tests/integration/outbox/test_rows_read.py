"""A relay reads the rows that it takes, whatever else is in its table, and whatever PostgreSQL believes about it.

Counted in rows by the server, not in time. The planner knows a table by statistics that may be missing, or from
another time, and it may keep a plan from when the table was small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

from onceward.outbox import statements
from onceward.outbox.backlog import outbox_backlog
from onceward.outbox.claims import Ending
from onceward.outbox.outages import Away
from tests.support.outbox import OutboxWorld, drain, outbox_on_postgresql

ROWS = 5_000
FEW = 200
"""Rows that a handful of messages may cost, all statements of a relay together."""
SHIP = "redis://x/ship"

FILL = """
    INSERT INTO onceward_outbox (message_id, target, key, state, at, digest, body, created_at, ended_at)
    SELECT 'many-' || number, :target, :key, :state, CASE WHEN :state IN ('delayed', 'held') THEN 1e10 + number END,
        ''::bytea, ''::bytea, 1, CASE WHEN :state = 'published' THEN 1e10 END
    FROM generate_series(1, :rows) AS number
"""
READ = """
    SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class
    WHERE oid = 'onceward_outbox'::regclass
        OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'onceward_outbox'::regclass)
"""
"""Rows and entries of indexes that this session has read."""


@pytest.fixture
def outbox(postgres_url: str) -> Iterator[OutboxWorld]:
    with outbox_on_postgresql(postgres_url) as world:
        with world.engine.begin() as connection:
            connection.execute(text("ALTER TABLE onceward_outbox SET (autovacuum_enabled = false)"))
        yield world


def fill(outbox: OutboxWorld, state: str, target: str = SHIP, key: str | None = None) -> None:
    values = {"state": state, "target": target, "key": key, "rows": ROWS}
    with outbox.engine.begin() as connection:
        connection.execute(text(FILL), values)


def run(outbox: OutboxWorld, *statements: str) -> None:
    with outbox.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for each in statements:
            connection.execute(text(each))


def never_analyzed(outbox: OutboxWorld) -> None: ...


def analyzed_when_it_was_emptied(outbox: OutboxWorld) -> None:
    """It has pages, and not a row on them: so an analysis calls a table, too, while a transaction fills it."""
    fill(outbox, "published")
    run(outbox, "DELETE FROM onceward_outbox", "ANALYZE onceward_outbox")


def analyzed_when_all_were_ready(outbox: OutboxWorld) -> None:
    fill(outbox, "ready", key="a")
    run(outbox, "ANALYZE onceward_outbox", "DELETE FROM onceward_outbox", "VACUUM onceward_outbox")


def planned_when_it_was_small(outbox: OutboxWorld) -> None:
    """The plans of a session are made, and kept, while one page is all there is to read."""
    relay = outbox.relay()
    outbox.send("first", key="a")
    drain(relay)
    run(outbox, "ANALYZE onceward_outbox")
    for number in range(15):
        outbox.send(number, key="a")
        outbox.send(f"due {number}", delay=0.001)
        drain(relay)
    run(outbox, "DELETE FROM onceward_outbox")
    outbox.sink.arrived.clear()


BELIEFS = [
    never_analyzed,
    analyzed_when_it_was_emptied,
    analyzed_when_all_were_ready,
    planned_when_it_was_small,
]
CROWDS: dict[str, dict[str, Any]] = {
    "delayed": {"state": "delayed"},
    "published": {"state": "published"},
    "waiting after a failure": {"state": "held"},
    "behind a stuck key": {"state": "behind", "key": "stuck"},
    "ready for another target": {"state": "ready", "target": "redis://x/away"},
}


@pytest.mark.usual("never_analyzed", "planned_when_it_was_small")
@pytest.mark.req("OB-07")
@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
@pytest.mark.parametrize("belief", BELIEFS, ids=lambda each: each.__name__)
def test_a_relay_reads_no_rows_but_its_own(
    outbox: OutboxWorld, belief: Callable[[OutboxWorld], None], crowd: dict[str, Any]
) -> None:
    belief(outbox)
    if crowd["state"] == "behind":
        outbox.send("stuck", key="stuck")
        run(outbox, "UPDATE onceward_outbox SET state = 'held', at = 1e10 WHERE key = 'stuck'")
    fill(outbox, **crowd)
    outbox.send("now", "then", key="a")
    outbox.send("free")
    outbox.send("due", delay=0.001)
    relay = outbox.relay()
    relay._outages._away["redis://x/away"] = Away(float("inf"), 1, 0.0, "away")
    with reads_of(outbox) as reads:
        drain(relay)
        relay._rows.unblock_stranded()
        relay._rows.purge(3600.0, 1000)
        with outbox.engine.begin() as connection:  # a look is a transaction of its own, which shows no count
            relay._rows._sql.on(connection, statements.LOOK_POSTGRESQL)
        if crowd["state"] in ("delayed", "published"):  # a count of what waits reads what waits
            with outbox.engine.begin() as connection:
                assert outbox_backlog(connection) == (0, 0)
    assert sorted(outbox.sink.payloads) == ["due", "free", "now", "then"]
    assert sum(reads) <= FEW


@pytest.mark.req("OB-07")
def test_what_is_ready_of_a_key_is_not_passed_for_each_claim(outbox: OutboxWorld) -> None:
    """What stands behind a message is found among those that stand behind, not among all of its key."""
    fill(outbox, "ready", key="a")
    rows = outbox.relay()._rows
    with reads_of(outbox) as reads:
        (claim,) = rows.claim(1, without=(), promote=False, lease=30.0, owner=None, targets=[SHIP])
        assert not rows.end(claim, Ending(published=list(claim.rows)))
    assert len(claim.rows) < ROWS / 5
    assert sum(reads) < ROWS


@pytest.mark.req("OB-04")
def test_a_turn_puts_a_part_of_many_messages_behind_a_stuck_one(outbox: OutboxWorld) -> None:
    """Other relays wait for their turn meanwhile."""
    outbox.send("stuck", key="stuck")
    run(outbox, "UPDATE onceward_outbox SET state = 'held', at = 1e10 WHERE key = 'stuck'")
    fill(outbox, "ready", key="stuck")
    outbox.send("free")
    relay = outbox.relay()
    with reads_of(outbox) as reads:
        (claim,) = relay._rows.claim(1, without=(), promote=False, lease=30.0, owner=None, targets=[SHIP])
    assert len(claim.rows) == 1
    assert outbox.rows().count("behind") == ROWS
    assert len(reads) > 1, "transactions"


@contextmanager
def reads_of(outbox: OutboxWorld) -> Iterator[list[int]]:
    """Rows that each transaction of the outbox reads."""
    reads: list[int] = []
    before = 0

    def begin(connection: Connection) -> None:
        nonlocal before
        before = connection.exec_driver_sql(READ).scalar_one()

    def end(connection: Connection) -> None:
        reads.append(connection.exec_driver_sql(READ).scalar_one() - before)

    event.listen(outbox.engine, "begin", begin)
    event.listen(outbox.engine, "commit", end)
    try:
        yield reads
    finally:
        event.remove(outbox.engine, "begin", begin)
        event.remove(outbox.engine, "commit", end)
