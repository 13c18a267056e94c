"""The outbox of an app: who may send where, and in which database."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from onceward._sync import run_blocking
from onceward.errors import ConfigurationError
from onceward.outbox.errors import OutboxError
from onceward.outbox.message import Lineage, Message, checked_id, checked_text, derived_id, message
from onceward.outbox.rows import ConnectionPort, cancel, insert, is_there, schema_of, write
from onceward.outbox.targets import Targets, stored

if TYPE_CHECKING:
    import sqlite3

    import psycopg
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from onceward.db.transaction import DbTransaction
    from onceward.outbox.sender import OutboxSender
    from onceward.outbox.sender_asyncio import AsyncOutboxSender

MOST_URLS = 1000


class Place(NamedTuple):
    """A database, as far as a URL says it."""

    dialect: str
    database: str | None
    search_path: str | None = None
    """Of PostgreSQL, if the URL names one."""


class DjangoConnection(Protocol):
    """`django.db.connection`, as far as the outbox knows it."""

    @property
    def in_atomic_block(self) -> bool: ...
    def get_autocommit(self) -> bool: ...
    def ensure_connection(self) -> None: ...


class HandledEvent(Protocol):
    """The event in flight, as an inbox knows it."""

    @property
    def tracking_id(self) -> str: ...


class Outbox:
    """`app.outbox(connection).send(…)` publishes in your own transaction; `session.send(…)` in the handler's."""

    def __init__(self, targets: Targets, place: Callable[[], Place]) -> None:
        """`place` returns the database that the relay reads, or raises `ConfigurationError` if there is none."""
        self.targets = targets
        self._place = place
        self._schemas: dict[Place, str] = {}
        """Of databases that were checked."""
        self._stored: dict[str, str] = {}
        """URLs that were checked."""

    @overload
    def __call__(
        self, connection: AsyncConnection | AsyncSession | psycopg.AsyncConnection[Any]
    ) -> AsyncOutboxSender: ...
    @overload
    def __call__(
        self,
        connection: Connection | Session | sqlite3.Connection | psycopg.Connection[Any] | DjangoConnection,
    ) -> OutboxSender: ...
    def __call__(self, connection: Any) -> Any:
        """Return what sends on this connection or session. It commits nothing: you do."""
        kind: Any = type(connection)
        return _sender(kind)(self, connection)

    def move(self, place: Place) -> None:
        """Let another database stand for the app's. A verification does it, in a process of its own."""
        self._place = lambda: place
        self._schemas.clear()

    def in_handler(self, event: HandledEvent, consumer_id: str) -> HandlerSends:
        """Return what sends in one attempt of a handler."""
        return HandlerSends(self, event, consumer_id)

    def message(self, target: Any, payload: Any, **given: Any) -> Message:
        """Check and encode a message. Writes nothing."""
        known = self._stored.get(target) if isinstance(target, str) else None
        if known is None:
            known = stored(target, self.targets)
            if isinstance(target, str) and len(self._stored) < MOST_URLS:
                self._stored[target] = known
        if "://" in known:
            return message(known, payload, **given)
        return message(known, payload, complete=partial(self._with_event_type, known), **given)

    def _with_event_type(self, name: str, payload: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self.targets.with_event_type(name, payload, metadata)
        except ConfigurationError as error:
            raise OutboxError(f"nothing was sent: {error}; name it: headers={{'event_type': …}}") from None

    async def check(self, port: ConnectionPort) -> None:
        """Raise `OutboxError` unless the connection is one to the app's database, with the table of the outbox."""
        found = Place(port.dialect, port.database)
        if found not in self._schemas:
            place = self._place()
            _check_place(place, port)
            await self.find_table(port, place.search_path)
        port.schema = self._schemas[found]

    async def find_table(self, port: ConnectionPort, search_path: str | None = None) -> None:
        """Let the port write to the table of the outbox. Raises `OutboxError` if there is none."""
        found = Place(port.dialect, port.database)
        if found not in self._schemas:
            schema = await schema_of(port, search_path)
            if schema is None:
                raise OutboxError(
                    "nothing was sent: the table onceward_outbox does not exist in this database; run `onceward inbox "
                    "migrate --database URL`, or start the app once with `onceward run`"
                )
            self._schemas[found] = schema
        port.schema = self._schemas[found]


@cache
def _sender(kind: Any) -> Any:
    from onceward.outbox.connections import is_async

    if is_async(kind):
        from onceward.outbox.sender_asyncio import AsyncOutboxSender

        return AsyncOutboxSender
    from onceward.outbox.sender import OutboxSender

    return OutboxSender


def _check_place(place: Place, port: ConnectionPort) -> None:
    if place.dialect != port.dialect:
        raise OutboxError(
            f"nothing was sent: the app's database is {place.dialect}, and this connection is one to {port.dialect}; "
            "the relay reads only the app's database"
        )
    if not place.database or not port.database:
        return
    same = place.database == port.database
    if place.dialect == "sqlite":
        same = os.path.realpath(place.database) == os.path.realpath(port.database)
    if not same:
        raise OutboxError(
            f"nothing was sent: this connection is one to the database {port.database!r}, but the app's is "
            f"{place.database!r}, and the relay reads only that; send on a connection to it"
        )


class ConnectionSends:
    """Sends on one connection of the caller."""

    def __init__(
        self, outbox: Outbox, connection: Any, port: Callable[[Any], Awaitable[ConnectionPort]]
    ) -> None:
        self._outbox = outbox
        self._connection = connection
        self._port = port

    async def send(self, target: Any, payload: Any, **given: Any) -> str:
        made = self._outbox.message(target, payload, **given)
        port = await self._port(self._connection)
        await self._outbox.check(port)
        return await write(port, made)

    async def cancel(self, message_id: str) -> bool:
        message_id = checked_id(message_id, "nothing was canceled: id")
        port = await self._port(self._connection)
        await self._outbox.check(port)
        return await cancel(port, message_id)


class HandlerSends:
    """The messages of one attempt at one event. The inbox calls it."""

    def __init__(self, outbox: Outbox, event: HandledEvent, consumer_id: str) -> None:
        self._outbox = outbox
        self._event = event
        self._consumer_id = consumer_id
        self._unnamed = 0
        self._used: set[str] = set()
        """Ids that were written, unless the handler has rolled back to a savepoint since."""

    def message(
        self, target: Any, payload: Any, *, id: str | None, name: str | None, **given: Any
    ) -> Message:
        """Check and encode a message, and derive its id."""
        tracking_id = self._event.tracking_id
        if id is not None and name is not None:
            raise OutboxError("nothing was sent: give id or name, not both")
        if id is None:
            if name is None:
                self._unnamed += 1
                part = f"number {self._unnamed}"
            else:
                part = f"name {checked_text(name, 'nothing was sent: name')}"
            id = derived_id(tracking_id, self._consumer_id, part)
        lineage = Lineage(tracking_id, tracking_id)
        return self._outbox.message(target, payload, id=id, lineage=lineage, **given)

    def write(self, transaction: DbTransaction, made: Message) -> str:
        """Write it in the transaction of the handler."""
        from onceward.outbox.connections import BlockingConnectionPort

        return run_blocking(self._write(BlockingConnectionPort(transaction.connection), made))

    async def _write(self, port: ConnectionPort, made: Message) -> str:
        await self._outbox.find_table(port)
        while not await insert(port, made):
            if made.id in self._used:
                raise OutboxError(
                    f"nothing was sent: this handler has sent a message with the id {made.id!r} in this attempt "
                    "already, and an id stands for one message; give each a name of its own, such as "
                    "name=f'ship-{item.id}'"
                )
            if await is_there(port, made):
                break
        self._used.add(made.id)
        return made.id
