"""Sending in a transaction of the caller: on every kind of connection, with errors at the call."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from onceward import Onceward
from onceward._sync import run_blocking
from onceward.connectors.codec import PayloadError, decode
from onceward.inbox import AsyncInbox, Inbox
from onceward.outbox import Outbox, OutboxError
from onceward.outbox.message import message
from onceward.outbox.outbox import Place
from onceward.outbox.rows import ConnectionPort, write
from tests.support.databases import Database, database
from tests.support.outbox import OutboxWorld, drain, outbox

__all__ = ["database", "outbox"]


class OnDatabase:
    """An outbox in a database of the test, with sends of either mode behind the same calls."""

    def __init__(self, database: Database) -> None:
        self.database = database
        app = Onceward("shop")
        url = database.plain().url
        self.outbox = Outbox(app.outbox.targets, lambda: Place(url.get_backend_name(), url.database))
        inbox = (AsyncInbox if database.asynchronous else Inbox)(database.default)
        self._await(inbox.migrate())

    def _await(self, result: Any) -> Any:
        return self.database.run(result) if self.database.asynchronous else result

    def within(self, use: Callable[[Any], Any], *, session: bool, commit: bool = True) -> Any:
        """Call `use` with a sender on a connection or a session, then commit or roll back."""
        engine = self.database.default
        if self.database.asynchronous:

            async def run() -> Any:
                opened: Any = AsyncSession(engine) if session else engine.connect()
                async with opened as connection:
                    result = await use(self.outbox(connection))
                    await (connection.commit() if commit else connection.rollback())
                    return result

            return self.database.run(run())
        opened = Session(engine) if session else engine.connect()
        with opened as connection:
            result = use(self.outbox(connection))
            connection.commit() if commit else connection.rollback()
            return result

    def ids(self) -> list[str]:
        with self.database.session() as session:
            return [
                row["message_id"]
                for row in session.fetch_all("SELECT message_id FROM onceward_outbox ORDER BY seq")
            ]


@pytest.mark.req("OB-01", "OB-10")
@pytest.mark.parametrize("session", [False, True], ids=["connection", "session"])
def test_a_send_commits_and_rolls_back_with_the_transaction(database: Database, session: bool) -> None:
    site = OnDatabase(database)
    sent = site.within(lambda sender: sender.send("redis://x/ship", {"id": 1}), session=session)
    site.within(lambda sender: sender.send("redis://x/ship", {"id": 2}), session=session, commit=False)
    assert site.ids() == [sent]
    assert site.within(lambda sender: sender.cancel(sent), session=session) is True
    assert site.within(lambda sender: sender.cancel(sent), session=session) is False
    assert site.ids() == []


class Undone(Exception): ...


@pytest.mark.req("OB-01", "OB-10")
@pytest.mark.parametrize("kind", [Session, Connection], ids=["session", "connection"])
def test_a_savepoint_that_comes_first_commits_no_message(outbox: OutboxWorld, kind: Any) -> None:
    def send(undo: bool) -> None:
        opened = Session(outbox.engine) if kind is Session else outbox.engine.connect()
        with opened as connection, connection.begin():
            with connection.begin_nested():
                outbox.app.outbox(connection).send("redis://x/ship", {"undone": undo})
            if undo:
                raise Undone

    with pytest.raises(Undone):
        send(undo=True)
    assert outbox.rows() == []
    send(undo=False)
    assert outbox.rows() == ["ready"]


@pytest.mark.req("OB-01", "OB-10")
def test_a_savepoint_that_comes_first_commits_no_message_in_asyncio(outbox: OutboxWorld) -> None:
    async def send(undo: bool) -> None:
        engine = outbox.app.create_async_engine()
        try:
            async with AsyncSession(engine) as session, session.begin():
                async with session.begin_nested():
                    await outbox.app.outbox(session).send("redis://x/ship", {"undone": undo})
                if undo:
                    raise Undone
        finally:
            await engine.dispose()

    with pytest.raises(Undone):
        asyncio.run(send(undo=True))
    assert outbox.rows() == []
    asyncio.run(send(undo=False))
    assert outbox.rows() == ["ready"]


@pytest.mark.req("OB-10")
def test_plain_connections_of_drivers(outbox: OutboxWorld) -> None:
    if outbox.engine.dialect.name == "sqlite":
        plain: Any = sqlite3.connect(str(outbox.engine.url.database))
    else:
        url = outbox.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        plain = psycopg.connect(url)
    with plain:
        outbox.app.outbox(plain).send("redis://x/ship", "one")
    if outbox.engine.dialect.name == "sqlite":
        plain.close()
        plain = sqlite3.connect(str(outbox.engine.url.database), isolation_level=None)
        begin: Any = lambda: plain.execute("BEGIN")  # noqa: E731
    else:
        plain = psycopg.connect(url, autocommit=True)
        begin = lambda: plain.execute("BEGIN")  # noqa: E731
    with pytest.raises(OutboxError, match="no transaction is open"):
        outbox.app.outbox(plain).send("redis://x/ship", "two")
    begin()
    outbox.app.outbox(plain).send("redis://x/ship", "two")
    plain.execute("ROLLBACK")
    plain.close()
    assert [decode(bytes(body)).payload for body in outbox.rows("body")] == ["one"]


async def _send_with_psycopg(app: Onceward, url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await app.outbox(connection).send("redis://x/ship", "one")
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        with pytest.raises(OutboxError, match="no transaction is open"):
            await app.outbox(connection).send("redis://x/ship", "two")
        async with connection.transaction():
            await app.outbox(connection).send("redis://x/ship", "two")


@pytest.mark.req("OB-10")
def test_a_connection_of_psycopg_in_asyncio(outbox: OutboxWorld) -> None:
    if outbox.engine.dialect.name == "postgresql":
        url = outbox.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        asyncio.run(_send_with_psycopg(outbox.app, url))
        assert [decode(bytes(body)).payload for body in outbox.rows("body")] == ["one", "two"]
    with pytest.raises(OutboxError, match=r"app\.outbox takes a Connection"):
        outbox.app.outbox(object()).send("redis://x/ship", 1)  # type: ignore[call-overload]


@pytest.mark.req("OB-11")
def test_what_is_near_a_connection_is_refused_with_what_to_pass() -> None:
    engine = create_engine("sqlite://")
    raw = engine.raw_connection()
    for given, advice in {
        engine: "pass a connection of it",
        sessionmaker(engine): "pass the session that it returns",
        scoped_session(sessionmaker(engine)): "pass the session that it returns",
        raw: "pass its driver_connection",
    }.items():
        with pytest.raises(OutboxError, match=advice):
            Onceward("shop").outbox(given).send("redis://x/ship", 1)  # type: ignore[call-overload]
    raw.close()
    engine.dispose()


class Odd:
    """Cannot be encoded."""


def unknown(order: dict) -> None: ...  # type: ignore[type-arg]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown function": (
        {"target": unknown},
        OutboxError,
        "unknown is neither a consumer nor a producer of shop",
    ),
    "unknown scheme": ({"target": "gopher://x"}, OutboxError, "'gopher://x' is not a sink"),
    "no target": ({"target": 7}, OutboxError, "a target is a consumer or producer function"),
    "odd payload": ({"payload": Odd()}, PayloadError, "Odd cannot be sent"),
    "huge number": ({"payload": {"n": 2**80}}, PayloadError, "cannot be"),
    "credential": ({"headers": {"authorization": "x"}}, PayloadError, "names a credential"),
    "headers": ({"headers": 7}, OutboxError, "headers must be a mapping"),
    "no time zone": ({"at": datetime(2030, 1, 1)}, OutboxError, "a datetime with a time zone"),
    "at is text": ({"at": "tomorrow"}, OutboxError, "a datetime with a time zone"),
    "negative": ({"delay": -1}, OutboxError, "delay must be"),
    "both": ({"delay": 1, "at": datetime.now(UTC)}, OutboxError, "not both"),
    "forever": ({"delay": 1e15}, OutboxError, "after the year 9999"),
    "empty id": ({"id": ""}, OutboxError, "id must be a string"),
    "a time in the year 10000": (
        {"at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))},
        OutboxError,
        "outside the years 1 to 9999",
    ),
    "odd key": ({"key": "a\0b"}, OutboxError, "key must be a string"),
}


@pytest.mark.req("OB-11")
@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_an_error_at_the_call_and_nothing_is_written(outbox: OutboxWorld, case: str) -> None:
    given, kind, message = WRONG[case]
    with outbox.engine.begin() as connection:
        with pytest.raises(kind, match=message):
            outbox.app.outbox(connection).send(**{"target": "redis://x/ship", "payload": 1, **given})
        outbox.app.outbox(connection).send("redis://x/ship", "fine")  # the transaction can go on
    assert [decode(bytes(body)).payload for body in outbox.rows("body")] == ["fine"]


@pytest.mark.req("OB-11")
def test_a_missing_table_and_another_database_are_named(outbox: OutboxWorld, tmp_path: Any) -> None:
    other = create_engine(f"sqlite:///{tmp_path}/other.db")
    with other.begin() as connection:
        match = (
            "another|this connection is one to"
            if outbox.engine.dialect.name == "postgresql"
            else "but the app's is"
        )
        with pytest.raises(OutboxError, match=match):
            outbox.app.outbox(connection).send("redis://x/ship", 1)
        empty = Onceward("empty", database=f"sqlite:///{tmp_path}/other.db")
        with pytest.raises(OutboxError, match="onceward inbox migrate"):
            empty.outbox(connection).send("redis://x/ship", 1)
        with pytest.raises(Exception, match="has no database"):
            Onceward("none").outbox(connection).send("redis://x/ship", 1)
    other.dispose()


@pytest.mark.req("OB-12")
def test_an_id_stands_for_one_message(outbox: OutboxWorld) -> None:
    outbox.send({"a": 1}, id="slot-1")
    assert outbox.send({"a": 1}, id="slot-1") == ["slot-1"]
    with pytest.raises(OutboxError, match="with another target, key or payload"):
        outbox.send({"a": 2}, id="slot-1")
    assert outbox.rows("message_id") == ["slot-1"]


@pytest.mark.req("OB-12")
def test_a_payload_whose_keys_have_another_order_is_the_same(outbox: OutboxWorld) -> None:
    """A dict that was built in another way is equal: a list in another order is not, nor is 1 for True."""
    outbox.send({2: [], "a": {}}, id="slot-0")
    assert outbox.send({"a": {}, 2: []}, id="slot-0") == ["slot-0"]
    with pytest.raises(OutboxError, match="with another target, key or payload"):
        outbox.send({"a": [], 2: []}, id="slot-0")
    outbox.send({"a": True, "b": {"c": [1, 2], "d": None}}, id="slot-1")
    assert outbox.send({"b": {"d": None, "c": [1, 2]}, "a": True}, id="slot-1") == ["slot-1"]
    for other in (
        {"a": 1, "b": {"c": [1, 2], "d": None}},
        {"a": True, "b": {"c": [2, 1], "d": None}},
        {"b": {"c": [1, 2], "d": None}},
        [["a", True], ["b", [["c", [1, 2]], ["d", None]]]],
    ):
        with pytest.raises(OutboxError, match="with another target, key or payload"):
            outbox.send(other, id="slot-1")
    with pytest.raises(OutboxError, match="with another target, key or payload"):
        outbox.send({"b": {"d": None, "c": [1, 2]}, "a": True}, id="slot-1", key="k")
    assert outbox.rows("message_id") == ["slot-0", "slot-1"]


@pytest.mark.req("OB-12")
def test_a_message_that_is_removed_while_it_is_sent_again_is_written_again() -> None:
    """Such as by a relay that purges, or a transaction that cancels, between the two statements on PostgreSQL."""
    made = message("redis://x/ship", 1, id="slot-1", key=None, delay=None, at=None, headers=None)
    assert run_blocking(write(_Removing(), made)) == "slot-1"


class _Removing(ConnectionPort):
    """Finds the id in its way at first, and then no message."""

    dialect = "postgresql"
    database = None

    def __init__(self) -> None:
        self._answers: list[list[Any]] = [[], [], [(1, "")]]

    async def execute(self, sql: str, values: dict[str, Any]) -> list[Any]:
        return self._answers.pop(0)


@pytest.mark.req("OB-07")
def test_a_delayed_message_has_its_due_time_as_its_own(outbox: OutboxWorld) -> None:
    """An inbox refuses events from before its horizon: a message that is due in years must not be years old then."""
    due = datetime.now(UTC) + timedelta(days=800)
    outbox.send("later", at=due)
    (body,) = outbox.rows("body")
    found = decode(bytes(body))
    assert found.created_at == due
    assert abs(int(found.id[:8] + found.id[9:13], 16) / 1000 - due.timestamp()) < 1


@pytest.mark.req("OB-24")
@pytest.mark.parametrize("days", [1000, 700_000])
def test_a_message_that_was_due_long_ago_is_sent_now_and_is_as_old_as_that(
    outbox: OutboxWorld, days: int
) -> None:
    """Such as a reminder for three days before a date that is tomorrow. An inbox would refuse it as too old."""
    began = datetime.now(UTC)
    outbox.send("past", at=began - timedelta(days=days), key="k")
    outbox.send("next", key="k")
    drain(outbox.relay())
    assert outbox.sink.payloads == ["past", "next"]
    past = outbox.sink.arrived[0]
    assert past.created_at >= began
    assert int(past.id[:8] + past.id[9:13], 16) / 1000 >= began.timestamp() - 1
    assert min(outbox.rows("created_at")) >= began.timestamp() - 1


@pytest.mark.req("OB-24")
def test_without_a_delay_a_message_does_not_wait(outbox: OutboxWorld) -> None:
    outbox.send("now", delay=0)
    outbox.send("now", delay=timedelta(0))
    assert outbox.rows() == ["ready", "ready"]


@pytest.mark.req("OB-25")
def test_an_id_is_canceled_however_it_is_spelled(outbox: OutboxWorld) -> None:
    id = str(uuid4())
    for spelled in (id, id.upper(), id.replace("-", "")):
        outbox.send("later", id=spelled, delay=1000)
        with outbox.engine.begin() as connection:
            assert outbox.app.outbox(connection).cancel(spelled) is True
    for wrong in (None, 5, ""):
        with (
            outbox.engine.begin() as connection,
            pytest.raises(OutboxError, match="nothing was canceled: id must be a string"),
        ):
            outbox.app.outbox(connection).cancel(wrong)  # type: ignore[arg-type]


class Kind(StrEnum):
    DAILY = "daily"


@pytest.mark.req("OB-25")
def test_an_id_and_a_key_may_be_members_of_an_enumeration_of_text(outbox: OutboxWorld) -> None:
    outbox.send("later", id=Kind.DAILY, key=Kind.DAILY, delay=1000)
    assert (outbox.rows("message_id"), outbox.rows("key")) == (["daily"], ["daily"])
    with outbox.engine.begin() as connection:
        assert outbox.app.outbox(connection).cancel(Kind.DAILY) is True


@pytest.mark.req("OB-07")
def test_a_message_that_was_tried_cannot_be_canceled(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    outbox.sink.refuse = lambda _: ConnectionError("away")
    (sent,) = outbox.send("one")
    (fetched,) = relay.fetch_transactions(1)

    def cancel() -> bool:
        with outbox.engine.begin() as connection:
            return outbox.app.outbox(connection).cancel(sent)

    assert cancel() is False
    relay.publish(fetched)
    assert cancel() is False  # it may have arrived
