"""Statements of onceward's own have a limit; those of a handler do not."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, create_engine, event

from onceward._sync import run_blocking
from onceward.deadletters import DeadLetters
from onceward.inbox import Contract, Event, Inbox
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
