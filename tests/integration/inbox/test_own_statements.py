"""Statements of onceward's own have a limit; those of a handler do not."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, Engine, create_engine, event

from onceward._sync import run_blocking
from onceward.deadletters import DeadLetters
from onceward.inbox import Contract, Event, Inbox
from onceward.inbox.stores.types import Key
from tests.support.schema import new_schema

CONTRACT = Contract(
    consumer_id="billing", event_types=["paid"], owner_team="t", idempotency_mechanism="inbox"
)


@pytest.fixture
def engine(postgres_url: str) -> Iterator[Engine]:
    with new_schema(postgres_url) as schema:
        made = create_engine(postgres_url, connect_args=schema.connect_args)
        yield made
        made.dispose()


@pytest.mark.req("RN-13")
def test_starts_heartbeats_and_redriven_letters_are_limited_and_a_handler_is_not(engine: Engine) -> None:
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(CONTRACT)
    limited: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "statement_timeout" in statement:
            limited.append(statement)

    shown: list[object] = []
    inbox.process(
        CONTRACT,
        Event(tracking_id="e1", event_type="paid", payload={}, created_at=datetime.now(UTC)),
        lambda event, session: shown.append(session.execute_scalar("SHOW statement_timeout")),
    )
    assert shown == ["0"]
    assert limited, "its start was limited"
    limited.clear()
    run_blocking(DeadLetters(engine).operations.deliver("billing", 10, 60.0))
    assert len(limited) == 1


@pytest.mark.req("GC-14")
def test_starts_of_a_batch_do_not_wait_for_the_disk_and_everything_else_does(engine: Engine) -> None:
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(CONTRACT)
    waits: list[object] = []

    @event.listens_for(engine, "commit")
    def note(connection: Connection) -> None:
        waits.append(connection.exec_driver_sql("SHOW synchronous_commit").scalar())

    ledger = inbox.processor.ledger
    run_blocking(ledger.expect(CONTRACT, [Key("billing", "e1", 20_000)]))
    run_blocking(ledger.start(CONTRACT, Key("billing", "e2", 20_000)))
    inbox.process(
        CONTRACT,
        Event(tracking_id="e3", event_type="paid", payload={}, created_at=datetime.now(UTC)),
        lambda event, session: session.execute("SELECT 1"),
    )
    assert waits[0] == "off"
    assert set(waits[1:]) == {"on"}, "a start that may be a claim, and the commit of an event"
