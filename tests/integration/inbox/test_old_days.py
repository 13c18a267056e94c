"""Events of long ago: a PostgreSQL inbox makes no table for each, and its stats stay one query."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy import event as happens

from onceward.inbox import Contract, Event, Inbox
from tests.support.inbox.ids import uuid7_of

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

CONTRACT = Contract(
    consumer_id="billing",
    event_types=["*"],
    owner_team="money",
    idempotency_mechanism="dedup record and invoice in one transaction",
)


@pytest.fixture
def engine(postgresql: Database) -> Iterator[Engine]:
    made = create_engine(postgresql.url, connect_args=postgresql.connect_args)
    yield made
    made.dispose()


@pytest.fixture
def inbox(engine: Engine) -> Inbox:
    made = Inbox(engine)
    made.migrate()
    made.register(CONTRACT)
    return made


def process(inbox: Inbox, tracking_id: str, days_ago: int) -> None:
    created_at = datetime.now(UTC) - timedelta(days=days_ago)
    event = Event(tracking_id=tracking_id, event_type="paid", created_at=created_at, payload={})
    inbox.process(CONTRACT, event, lambda event, session: None)


def day_partitions(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(
            connection.exec_driver_sql(
                "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE 'onceward_dedup%%'"
                " AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'onceward_dedup'::regclass)"
            ).scalars()
        )


def queries_of_stats(inbox: Inbox, engine: Engine) -> list[str]:
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    happens.listen(engine, "before_cursor_execute", note)
    try:
        inbox.stats()
    finally:
        happens.remove(engine, "before_cursor_execute", note)
    return seen


@pytest.mark.req("CC-085")
def test_each_event_has_another_old_day_and_no_table_is_made(inbox: Inbox, engine: Engine) -> None:
    process(inbox, "first", 1)
    before, asked = day_partitions(engine), queries_of_stats(inbox, engine)
    for days_ago in range(2, 42):
        process(inbox, f"event-{days_ago}", 20 * days_ago)
    assert day_partitions(engine) == before
    assert queries_of_stats(inbox, engine) == asked
    [stats] = inbox.stats()
    assert stats["dedup_rows"] == 41


@pytest.mark.req("CC-085")
def test_ids_that_contain_their_day_share_a_table_with_the_others_of_that_day(
    inbox: Inbox, engine: Engine
) -> None:
    today = int(datetime.now(UTC).timestamp()) // 86_400
    for name in ("a", "b"):
        process(inbox, uuid7_of(today - 700, name), 700)
    before, asked = day_partitions(engine), queries_of_stats(inbox, engine)
    for number in range(20):
        process(inbox, uuid7_of(today - 700, number), 700)
    assert day_partitions(engine) == before
    assert queries_of_stats(inbox, engine) == asked
