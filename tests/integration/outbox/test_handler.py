"""Sending in a handler: the messages, the effects and the record of the event are one commit."""

from __future__ import annotations

from typing import Any

import pytest

from onceward import Onceward, Transaction
from onceward.connectors.codec import decode
from onceward.db import AsyncDbSession, DbSession
from onceward.inbox import AsyncInbox, Inbox
from onceward.outbox import OutboxError
from onceward.outbox.message import derived_id
from tests.support.databases import Database, database
from tests.support.inbox.contracts import contract

__all__ = ["database"]


class Desk:
    """An inbox with an outbox, and handlers of either mode as one generator function: it yields what it awaits."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.inbox: Any = (AsyncInbox if database.asynchronous else Inbox)(database.default)
        self.app = Onceward("shop")
        self.inbox.set_outbox(self.app.outbox)
        self.run(self.inbox.migrate())

    def run(self, result: Any) -> Any:
        return self.database.run(result) if self.database.asynchronous else result

    def handle(self, event: str, handler: Any, *, joined: bool = False, mode: str = "transactional") -> Any:
        terms = contract(consumer_id="charge", mode=mode)
        self.run(self.inbox.register(terms))
        delivered = Transaction(id=event, payload={}, metadata={"event_type": terms.event_types[0]})

        def plain(event: Any, session: Any) -> None:
            for _ in handler(session):
                pass

        async def awaiting(event: Any, session: Any) -> None:
            for each in handler(session):
                await each

        function: Any = awaiting if self.database.asynchronous else plain
        if not joined:
            return self.run(self.inbox.process(terms, delivered, function))
        engine = self.database.default
        if self.database.asynchronous:

            async def join() -> Any:
                async with AsyncDbSession(engine) as session:
                    return await self.inbox.process(terms, delivered, function, session=session)

            return self.database.run(join())
        with DbSession(engine) as session:
            return self.inbox.process(terms, delivered, function, session=session)

    def sent(self) -> list[Transaction]:
        with self.database.session() as session:
            rows = session.fetch_all("SELECT body FROM onceward_outbox ORDER BY seq")
        return [decode(bytes(row["body"])) for row in rows]


@pytest.fixture
def desk(database: Database) -> Desk:
    return Desk(database)


@pytest.mark.req("OB-09")
@pytest.mark.parametrize("how", ["transactional", "effectful", "joined"])
def test_a_send_commits_with_the_event(desk: Desk, how: str) -> None:
    def send(session: Any) -> Any:
        yield session.send("redis://x/ship", {"id": 1}, key="k", headers={"shape": "round"})
        yield session.send("redis://x/ship", {"id": 2}, name="second")

    def fail(session: Any) -> Any:
        yield session.send("redis://x/ship", {"id": 3})
        raise RuntimeError("as it was asked")

    given: Any = {"joined": True} if how == "joined" else {"mode": how}
    assert desk.handle("e1", send, **given).done
    with pytest.raises(RuntimeError):
        desk.handle("e2", fail, **given)
    assert not desk.handle("e1", send, **given).done  # a duplicate sends nothing
    first, second = desk.sent()
    assert [first.id, second.id] == [
        derived_id("e1", "charge", "number 1"),
        derived_id("e1", "charge", "name second"),
    ]
    assert (first.payload, dict(first.metadata), first.parent_id) == ({"id": 1}, {"shape": "round"}, "e1")


@pytest.mark.req("OB-09")
def test_a_repeated_handler_sends_the_same_ids(desk: Desk) -> None:
    tried: list[list[str]] = []

    def send(session: Any) -> Any:
        ids: list[str] = []
        tried.append(ids)
        for number in range(3):
            sent = session.send("redis://x/ship", number)
            if desk.database.asynchronous:

                async def note(sent: Any = sent) -> None:
                    ids.append(await sent)

                yield note()
            else:
                ids.append(sent)
                yield
        if len(tried) == 1:
            raise RuntimeError("after the sends")

    with pytest.raises(RuntimeError):
        desk.handle("e1", send)
    desk.handle("e1", send)
    assert tried[0] == tried[1] == [each.id for each in desk.sent()]
    assert len(set(tried[0])) == 3


@pytest.mark.req("OB-12")
def test_two_messages_with_one_id_are_an_error_that_says_to_name_each(desk: Desk) -> None:
    def send(session: Any) -> Any:
        yield session.send("redis://x/ship", 1, name="ship")
        yield session.send("redis://x/ship", 2, name="ship")

    with pytest.raises(OutboxError, match="give each a name of its own"):
        desk.handle("e1", send)
    assert desk.sent() == []


@pytest.mark.req("OB-09")
def test_the_targets_of_an_app_are_stored_by_name(desk: Desk) -> None:
    @desk.app.consumer("redis://:secret-password@localhost/orders?group=ship", contract=None)
    def ship(order: dict) -> None: ...  # type: ignore[type-arg]

    @desk.app.producer("redis://:secret-password@localhost/audit")
    def audit() -> dict: ...  # type: ignore[type-arg]

    def send(session: Any) -> Any:
        yield session.send(ship, 1)
        yield session.send(audit, 2)

    desk.handle("e1", send)
    with desk.database.session() as session:
        found = session.fetch_all("SELECT target FROM onceward_outbox ORDER BY seq")
    assert [row["target"] for row in found] == ["consumer:ship", "producer:audit"]


@pytest.mark.req("OB-09")
def test_without_an_outbox_a_send_says_how_to_get_one(desk: Desk) -> None:
    desk.inbox.processor.outbox = None

    def send(session: Any) -> Any:
        yield session.send("redis://x/ship", 1)

    with pytest.raises(ValueError, match=r"inbox\.set_outbox"):
        desk.handle("e1", send)


@pytest.mark.req("OB-28")
def test_a_send_that_was_rolled_back_to_a_savepoint_can_be_repeated(database: Database) -> None:
    desk = Desk(database)

    def handler(session: Any) -> Any:
        yield session.execute("SAVEPOINT before")
        yield session.send("redis://x/ship", "first", name="a")
        yield session.execute("ROLLBACK TO SAVEPOINT before")
        yield session.send("redis://x/ship", "second", name="a")

    desk.handle("e1", handler)
    assert [each.payload for each in desk.sent()] == ["second"]
