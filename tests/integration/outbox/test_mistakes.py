"""Wrong input in every flavor of a send: an error at the call, and nothing written."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from onceward.connectors.codec import PayloadError
from onceward.outbox import Delayed, OutboxError
from tests.integration.outbox.test_handler import Desk
from tests.integration.outbox.test_send import OnDatabase
from tests.support.databases import Database, database
from tests.support.outbox import OutboxWorld, outbox

__all__ = ["database", "outbox"]

MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target": "gopher://x"}, OutboxError, "is not a sink"),
    ({"target": "memory://ship"}, OutboxError, "another process and has another memory"),
    ({"target": 7}, OutboxError, "or a URL, not int"),
    ({"payload": object()}, PayloadError, "cannot be sent"),
    ({"payload": Delayed(1, delay=50)}, OutboxError, "pass its payload, and delay=… or at=…"),
    ({"payload": 2**80}, PayloadError, "more than 64 bits"),
    ({"payload": "\ud83d"}, PayloadError, "half of a character"),
    ({"id": "a\0b"}, OutboxError, "not a text with NUL"),
    ({"key": "k" * 500}, OutboxError, "not 500 characters"),
    ({"at": datetime(2030, 1, 1)}, OutboxError, "a datetime with a time zone"),
]


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    return {"target": "redis://x/ship", "payload": 1, **given}


@pytest.mark.req("OB-11")
@pytest.mark.parametrize("session", [False, True], ids=["connection", "session"])
def test_on_connections_and_sessions_of_sqlalchemy(database: Database, session: bool) -> None:
    site = OnDatabase(database)
    for given, kind, message in MISTAKES:
        with pytest.raises(kind, match=message):
            site.within(lambda sender, given=given: sender.send(**arguments(given)), session=session)
    assert site.ids() == []
    with database.session() as other:
        other.execute("DROP TABLE onceward_outbox")
    with pytest.raises(OutboxError, match=r"onceward_outbox does not exist.*onceward inbox migrate"):
        site.within(lambda sender: sender.send("redis://x/ship", 1), session=session)


@pytest.mark.req("OB-11")
@pytest.mark.parametrize("session", [False, True], ids=["connection", "session"])
def test_without_a_transaction(database: Database, session: bool) -> None:
    """An engine in autocommit mode: the message would commit by itself."""
    site = OnDatabase(database)
    engine = database.engine(isolation_level="AUTOCOMMIT")

    async def send_async() -> None:
        opened: Any = AsyncSession(engine) if session else engine.connect()
        async with opened as connection:
            await site.outbox(connection).send("redis://x/ship", 1)

    def send() -> None:
        with Session(engine) if session else engine.connect() as connection:
            site.outbox(connection).send("redis://x/ship", 1)

    with pytest.raises(OutboxError, match="no transaction is open"):
        database.run(send_async()) if database.asynchronous else send()
    assert site.ids() == []


@pytest.mark.req("OB-25")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": 5}, "name must be"),
        ({"name": ""}, "name must be"),
        ({"name": "a", "id": "b"}, "id or name, not both"),
    ],
)
def test_a_name_in_a_handler(database: Database, given: dict[str, Any], message: str) -> None:
    desk = Desk(database)

    def send(session: Any) -> Any:
        yield session.send(**arguments(given))

    with pytest.raises(OutboxError, match=message):
        desk.handle("e1", send)
    assert desk.sent() == []


@pytest.mark.req("OB-11")
def test_in_a_handler(database: Database) -> None:
    desk = Desk(database)
    for number, (given, kind, message) in enumerate(MISTAKES):

        def send(session: Any, given: dict[str, Any] = given) -> Any:
            yield session.send(**arguments(given))

        with pytest.raises(kind, match=message):
            desk.handle(f"e{number}", send)
    assert desk.sent() == []
    with database.session() as other:
        other.execute("DROP TABLE onceward_outbox")

    def send_anyway(session: Any) -> Any:
        yield session.send("redis://x/ship", 1)

    with pytest.raises(OutboxError, match=r"onceward_outbox does not exist.*onceward inbox migrate"):
        desk.handle("last", send_anyway)


@pytest.mark.req("OB-11")
def test_on_plain_connections_of_drivers(outbox: OutboxWorld) -> None:
    is_sqlite = outbox.engine.dialect.name == "sqlite"
    url = outbox.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    plain: Any = sqlite3.connect(str(outbox.engine.url.database)) if is_sqlite else psycopg.connect(url)

    async def send_async(given: dict[str, Any]) -> None:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await outbox.app.outbox(connection).send(**arguments(given))

    for given, kind, message in MISTAKES:
        with pytest.raises(kind, match=message):
            outbox.app.outbox(plain).send(**arguments(given))
        if not is_sqlite:
            with pytest.raises(kind, match=message):
                asyncio.run(send_async(given))
    plain.commit()
    assert outbox.rows("message_id") == []
    with outbox.engine.begin() as connection:
        connection.execute(text("DROP TABLE onceward_outbox"))
    with pytest.raises(OutboxError, match="onceward_outbox does not exist"):
        outbox.app.outbox(plain).send("redis://x/ship", 1)
    plain.close()
