"""`process(session=…)` inside a caller's transaction counts retries like every other path."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from onceward.db import AsyncDbSession, DbSession
from onceward.inbox import AsyncInbox, Busy, Event, Inbox
from onceward.testing.telemetry import Recording, record
from tests.support.inbox.contracts import contract

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

pytestmark = pytest.mark.req("CC-080")


class Joining:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.inbox: Any = (AsyncInbox if database.asynchronous else Inbox)(database.default)
        self._do(self.inbox.migrate())
        self._do(self.inbox.register(contract()))

    def _do(self, result: Any) -> Any:
        return self._database.run(result) if self._database.asynchronous else result

    def attempt(self, event: Event, error: Exception | None = None) -> None:
        def handle(event: Event, session: Any) -> None:
            if error is not None:
                raise error

        async def handle_async(event: Event, session: Any) -> None:
            handle(event, session)

        async def process() -> None:
            async with AsyncDbSession(self._database.default) as session:
                await self.inbox.process(contract(), event, handle_async, session=session)

        if self._database.asynchronous:
            self._database.run(process())
            return
        with DbSession(self._database.default) as session:
            self.inbox.process(contract(), event, handle, session=session)

    def fail(self, event: Event, error: Exception) -> None:
        with pytest.raises(type(error)):
            self.attempt(event, error)


def event(tracking_id: str, deliveries: int | None = None) -> Event:
    return Event(
        tracking_id=tracking_id,
        event_type="paid",
        created_at=datetime.now(UTC),
        payload={},
        deliveries=deliveries,
    )


def retries(recording: Recording) -> tuple[int, int]:
    """How many events were counted, and their retries in total."""
    (point,) = recording.points("onceward.inbox.retries")
    return point.count, point.sum


def test_deliveries_of_the_source_are_retries(database: Database) -> None:
    joining = Joining(database)
    with record() as recording:
        joining.attempt(event("first", 1))
        joining.attempt(event("third", 3))
        joining.attempt(event("third", 3))  # a duplicate: nothing was retried
        assert retries(recording) == (2, 2)


def test_failed_attempts_in_this_process_are_retries(database: Database) -> None:
    joining = Joining(database)
    again = event("a")
    with record() as recording:
        joining.fail(again, ValueError("no"))
        joining.fail(again, Busy("later"))  # counts as no attempt
        joining.fail(again, ValueError("no"))
        joining.attempt(again)
        assert retries(recording) == (1, 2)
        joining.attempt(event("b"))
        assert retries(recording) == (2, 2)


def test_both_are_not_added_up(database: Database) -> None:
    joining = Joining(database)
    with record() as recording:
        joining.fail(event("a", 1), ValueError("no"))
        joining.fail(event("a", 2), ValueError("no"))
        joining.attempt(event("a", 3))
        assert retries(recording) == (1, 2)
