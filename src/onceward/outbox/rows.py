"""Writing a message into the outbox, or removing it again, inside a transaction of the caller.

Coroutines over a `ConnectionPort`, for threads and asyncio. One statement writes a message and, on PostgreSQL, lets the
relay know at the commit.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from onceward._time import wall
from onceward.outbox.errors import OutboxError
from onceward.outbox.message import Message

CHANNEL = "onceward_outbox"
"""Of PostgreSQL's notifications."""


class ConnectionPort(ABC):
    """A connection in a transaction of the caller."""

    dialect: str
    database: str | None
    """Its database: the name, or the path of the file; None if that is not known."""

    @abstractmethod
    async def execute(self, sql: str, values: dict[str, Any]) -> list[Any]:
        """Run a statement with `:name` parameters, and return its rows. On SQLite, `:now` is given."""

    async def insert_ready(self, message: Message) -> bool:
        """Insert a message that is ready. Return False if its id is there already."""
        return _is_one(await self.execute(_FULL[self.dialect, READY], _values(message)))


async def write(port: ConnectionPort, message: Message) -> str:
    """Write it, unless the same message was sent before. Return its id."""
    if message.at is None and message.delay is None:
        written = await port.insert_ready(message)
    else:
        values = {**_values(message), "at": message.at, "delay": message.delay}
        written = _is_one(await port.execute(_FULL[port.dialect, DELAYED], values))
    if not written:
        await _check_same(port, message)
    return message.id


def insert_in_sqlite(driver: Any, message: Message) -> bool:
    """Insert a message that is ready, on a plain connection of sqlite3. Of all sends, this one is the fastest."""
    values = (message.id, message.target, message.key, message.digest, message.body, wall())
    return bool(driver.execute(_READY_IN_SQLITE, values).rowcount == 1)


def _values(message: Message) -> dict[str, Any]:
    return {
        "id": message.id,
        "target": message.target,
        "key": message.key,
        "digest": message.digest,
        "body": message.body,
    }


def _is_one(rows: list[Any]) -> bool:
    return bool(rows) and rows[0][0] == 1


async def _check_same(port: ConnectionPort, message: Message) -> None:
    """An id stands for one message: sending it again changes nothing, sending another under it is an error."""
    found = await port.execute(_FIND, {"id": message.id})
    if found and bytes(found[0][0]) == message.digest:
        return
    raise OutboxError(
        f"nothing was sent: a message with the id {message.id!r} is in the outbox already, with another target, key or "
        "payload; an id stands for one message, so give this one another"
    )


async def cancel(port: ConnectionPort, message_id: str) -> bool:
    """Remove it if it was never tried. Return whether it was removed, and so will not be published."""
    if port.dialect == "sqlite":
        await port.execute(_TALLY_CANCELED, {"id": message_id})
        return bool(await port.execute(_REMOVE, {"id": message_id}))
    return bool(await port.execute(_CANCEL, {"id": message_id}))


async def exists(port: ConnectionPort) -> bool:
    """Whether the table of the outbox exists."""
    return bool((await port.execute(_EXISTS[port.dialect], {}))[0][0])


READY, DELAYED = "ready", "delayed"

_NOW = {"sqlite": ":now", "postgresql": "extract(epoch FROM clock_timestamp())::double precision"}
_INSERT = """
    INSERT INTO onceward_outbox (message_id, target, key, state, at, digest, body, created_at)
    VALUES (:id, :target, :key, '{state}', {at}, :digest, :body, {now}) ON CONFLICT (message_id) DO NOTHING RETURNING 1
"""
_AT = {
    READY: "NULL",
    DELAYED: "coalesce(CAST(:at AS double precision), {now} + CAST(:delay AS double precision))",
}


def _statement(dialect: str, state: str) -> str:
    insert = _INSERT.replace("{at}", _AT[state]).replace("{state}", state).replace("{now}", _NOW[dialect])
    if dialect == "sqlite":
        return insert
    wake = f", pg_notify('{CHANNEL}', '')" if state == READY else ""
    return f"WITH sent AS ({insert}) SELECT count(*){wake} FROM sent"


_FULL = {(dialect, state): _statement(dialect, state) for dialect in _NOW for state in (READY, DELAYED)}
_READY_IN_SQLITE = re.sub(r":\w+", "?", _FULL["sqlite", READY]).replace("RETURNING 1", "")
_FIND = "SELECT digest FROM onceward_outbox WHERE message_id = :id"
_NEVER_TRIED = "message_id = :id AND attempts = 0 AND state IN ('ready', 'delayed', 'behind')"
_REMOVE = f"DELETE FROM onceward_outbox WHERE {_NEVER_TRIED} RETURNING target"
_TALLY = "INSERT INTO onceward_outbox_tally (what, target, messages) SELECT 'canceled', target, 1 FROM"
_TALLY_CANCELED = f"{_TALLY} onceward_outbox WHERE {_NEVER_TRIED} RETURNING 1"
_CANCEL = f"WITH gone AS ({_REMOVE}), noted AS ({_TALLY} gone) SELECT 1 FROM gone"
_EXISTS = {
    "sqlite": "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'onceward_outbox'",
    "postgresql": "SELECT to_regclass('onceward_outbox') IS NOT NULL",
}
