"""Writing a message into the outbox, or removing it again, inside a transaction of the caller.

Coroutines over a `ConnectionPort`, for threads and asyncio. One statement writes a message and, on PostgreSQL, lets the
relay know at the commit.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from functools import lru_cache
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
    schema: str = ""
    """Of the tables of the outbox, quoted and with a dot; empty for what the connection finds by itself."""

    @abstractmethod
    async def execute(self, sql: str, values: dict[str, Any]) -> list[Any]:
        """Run a statement with `:name` parameters, and return its rows. On SQLite, `:now` is given."""

    async def insert_ready(self, message: Message) -> bool:
        """Insert a message that is ready. Return False if its id is there already."""
        return _is_one(await _run(self, _FULL[self.dialect, READY], _values(message)))


async def write(port: ConnectionPort, message: Message) -> str:
    """Write it, unless the same message was sent before. Return its id."""
    while not await insert(port, message) and not await is_there(port, message):
        pass  # it was removed meanwhile
    return message.id


async def insert(port: ConnectionPort, message: Message) -> bool:
    """Write it, and return True. Return False if its id is there already."""
    if message.at is None and message.delay is None:
        return await port.insert_ready(message)
    values = {**_values(message), "at": message.at, "delay": message.delay}
    return _is_one(await _run(port, _FULL[port.dialect, DELAYED], values))


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


async def is_there(port: ConnectionPort, message: Message) -> bool:
    """An id stands for one message: sending it again changes nothing, sending another under it is an error. Return
    False if there is none of this id any more."""
    found = await _run(port, _FIND, {"id": message.id})
    if not found or message.is_same(*found[0]):
        return bool(found)
    raise OutboxError(
        f"nothing was sent: a message with the id {message.id!r} is in the outbox already, with another target, key or "
        "payload; an id stands for one message, so give this one another"
    )


async def cancel(port: ConnectionPort, message_id: str) -> bool:
    """Remove it if it was never tried. Return whether it was removed, and so will not be published."""
    if port.dialect == "sqlite":
        await _run(port, _TALLY_CANCELED, {"id": message_id})
        return bool(await _run(port, _REMOVE, {"id": message_id}))
    return bool(await _run(port, _CANCEL, {"id": message_id}))


async def schema_of(port: ConnectionPort, search_path: str | None) -> str | None:
    """Return the schema of the outbox's tables, as `ConnectionPort.schema` has it; None if there is no table.

    On PostgreSQL it is that of the search path that the app has, or else of the one that this connection began with:
    the caller may have set another since, and the relay reads only one table.
    """
    if port.dialect == "sqlite":
        return "" if (await port.execute(_EXISTS_IN_SQLITE, {}))[0][0] else None
    found = await port.execute(_SCHEMA, {"path": search_path})
    if found:
        schema = str(found[0][0])
        return "" if ":" in schema or "%" in schema else f"{schema}."
    is_visible = search_path is None and (await port.execute(_IS_VISIBLE, {}))[0][0]
    return "" if is_visible else None


async def _run(port: ConnectionPort, sql: str, values: dict[str, Any]) -> list[Any]:
    return await port.execute(_in_schema(sql, port.schema), values)


@lru_cache(100)
def _in_schema(sql: str, schema: str) -> str:
    return sql.replace("{schema}", schema)


READY, DELAYED = "ready", "delayed"
SOON = 10
"""A message that is due within these seconds wakes the relay, so it knows when to look. By itself it looks sooner than
that."""

_NOW = {"sqlite": ":now", "postgresql": "extract(epoch FROM clock_timestamp())::double precision"}
_INSERT = """
    INSERT INTO {schema}onceward_outbox (message_id, target, key, state, at, digest, body, created_at)
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
    wake = f"pg_notify('{CHANNEL}', '')"
    if state == DELAYED:
        wake = f"CASE WHEN at < {_NOW[dialect]} + {SOON} THEN {wake} END"
    return insert.replace("RETURNING 1", f"RETURNING 1, {wake}")


_FULL = {(dialect, state): _statement(dialect, state) for dialect in _NOW for state in (READY, DELAYED)}
_READY_IN_SQLITE = re.sub(r":\w+", "?", _in_schema(_FULL["sqlite", READY], "")).replace("RETURNING 1", "")
_FIND = "SELECT target, key, digest, body FROM {schema}onceward_outbox WHERE message_id = :id"
_NEVER_TRIED = "message_id = :id AND attempts = 0 AND state IN ('ready', 'delayed', 'behind')"
_REMOVE = f"DELETE FROM {{schema}}onceward_outbox WHERE {_NEVER_TRIED} RETURNING target"
_TALLY = (
    "INSERT INTO {schema}onceward_outbox_tally (what, target, messages) SELECT 'canceled', target, 1 FROM"
)
_TALLY_CANCELED = f"{_TALLY} {{schema}}onceward_outbox WHERE {_NEVER_TRIED} RETURNING 1"
_CANCEL = f"WITH gone AS ({_REMOVE}), noted AS ({_TALLY} gone) SELECT 1 FROM gone"
_EXISTS_IN_SQLITE = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'onceward_outbox'"
_IS_VISIBLE = "SELECT to_regclass('onceward_outbox') IS NOT NULL"
_SCHEMA = """
    SELECT quote_ident(n.nspname) FROM unnest(string_to_array(coalesce(
        CAST(:path AS text), (SELECT reset_val FROM pg_settings WHERE name = 'search_path')
    ), ',')) WITH ORDINALITY AS part(name, number)
    JOIN pg_namespace n ON n.nspname = CASE
        WHEN btrim(part.name) = '"$user"' THEN current_user
        WHEN left(btrim(part.name), 1) = '"' THEN btrim(part.name, ' "')
        ELSE lower(btrim(part.name)) END
    WHERE to_regclass(quote_ident(n.nspname) || '.onceward_outbox') IS NOT NULL ORDER BY part.number LIMIT 1
"""
