"""Redis, as the connector speaks to it: some commands out, their raw replies back, each command sent once.

On connections of our own, made like those of the client we are given, which is left alone. A client sends a failed
command again by itself: what was appended would be appended twice, and a lost connection would not show.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis.asyncio.connection
import redis.connection
from hiredis import pack_command

from onceward._redis.connections import Connections
from onceward.errors import ConfigurationError

Command = tuple[Any, ...]


class Wire:
    """In threads. Any number of them may use one: each exchange has a connection of its own, kept for the next."""

    def __init__(self, given: Any) -> None:
        client = _client(given, redis.Redis)
        self._connections = Connections(client, redis.connection.AbstractConnection, "redis.Redis")
        self.server = _server(client)
        self._free: deque[Any] = deque()
        self._closed = False

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, in order; errors of single commands are among them. Raises when Redis is not to be had."""
        connection = self._take()
        try:
            connection.send_packed_command([_packed(commands)], check_health=False)
            replies = [_reply(connection) for _ in commands]
        except BaseException:
            connection.disconnect()  # a reply may still be under way in it
            raise
        self._free.append(connection)
        if self._closed:
            self.close()
        return replies

    def close(self) -> None:
        """For good: what is in use now is closed by whoever uses it."""
        self._closed = True
        with suppress(IndexError):
            while True:
                self._free.pop().disconnect()

    def _take(self) -> Any:
        with suppress(IndexError):
            while True:
                connection = self._free.pop()
                if _is_usable(connection):
                    return connection
                connection.disconnect()
        connection = self._connections.make(self._connections.reply_timeout)
        connection.connect()
        return connection


class AsyncWire:
    """In asyncio. Any number of tasks may use one."""

    def __init__(self, given: Any) -> None:
        client = _client(given, redis.asyncio.Redis)
        kind = redis.asyncio.connection.AbstractConnection
        self._connections = Connections(client, kind, "redis.asyncio.Redis")
        self.server = _server(client)
        self._free: list[Any] = []
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """As `Wire.exchange`."""
        connection = await self._take()
        patience = self._connections.reply_timeout
        try:
            # One limit for all of it: the connection's own would cost a task for each command.
            async with asyncio.timeout(patience):
                if not connection.is_connected:
                    await connection.connect()
                await connection.send_packed_command([_packed(commands)], check_health=False)
                replies = [await _reply_async(connection) for _ in commands]
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if type(error) is TimeoutError:
                raise redis.TimeoutError(f"no reply from Redis in {patience:g} s") from None
            raise
        self._free.append(connection)
        if self._closed:
            await self.close()
        return replies

    async def close(self) -> None:
        """As `Wire.close`."""
        self._closed = True
        free, self._free = self._free, []
        for connection in free:
            await connection.disconnect()

    async def _take(self) -> Any:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._free = loop, []  # those of an event loop that has ended are of no use
        while self._free:
            connection = self._free.pop()
            if connection.is_connected and not connection._reader.at_eof():
                return connection
            await connection.disconnect(nowait=True)
        return self._connections.make(socket_timeout=None)


def _client(given: Any, kind: type[Any]) -> Any:
    """What says where to connect to: a client, or one made from a URL, which never connects."""
    if isinstance(given, str):
        return kind.from_url(given)
    if not isinstance(given, kind):
        raise ConfigurationError(
            f"give a redis URL or a {kind.__module__.partition('.client')[0]}.{kind.__name__}, "
            f"not {type(given).__module__}.{type(given).__name__}"
        )
    return given


def _server(client: Any) -> str:
    """What tells it from other servers, in threads and asyncio alike; without a password."""
    pool = client.connection_pool
    given = pool.connection_kwargs
    place = given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
    service = getattr(pool, "service_name", "")  # a Sentinel's
    return f"{service} {place} {given.get('db') or 0}"


def _is_usable(connection: Any) -> bool:
    """Whether Redis has left it open meanwhile, and no fork has made it another's."""
    try:
        return connection.pid == os.getpid() and not connection.can_read(0)
    except redis.ConnectionError:
        return False


def _packed(commands: Sequence[Command]) -> bytes:
    # The driver for asyncio packs in Python, which for an XACK of many takes longer than all the rest.
    return b"".join(map(pack_command, commands))


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


async def _reply_async(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except redis.ResponseError as error:
        return error
