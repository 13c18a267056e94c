"""Redis from asyncio: send commands together, return their replies. A failed command is not sent again.

The driver connects and logs in. After that this reads and writes its streams itself, in half of the time.
"""

from __future__ import annotations

import asyncio
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final

import redis.exceptions
from redis.asyncio.connection import AbstractConnection

from onceward._process.stop import LAST_WAIT, AsyncStop, engine_stop
from onceward._redis.connections import FAILURES, Connections, RedisCommand, drain, is_worth_waiting, pack
from onceward._redis.line import MORE, READ_SIZE, lost, reader_of
from onceward._redis.wire import BlockingRedisWire

_NONE_YET: Final = object()
"""Stands for a reply that has not arrived, because nothing waited for it or a stop ended the wait."""
_NEVER: Final = AsyncStop()
"""The stop of exchanges that nothing stops."""
_NO_HASTE: Final = nullcontext()


class AsyncRedisWire:
    """Tasks may share one: each exchange has its own connection, kept for the next."""

    def __init__(self, client: Any, stop: AsyncStop | None = None) -> None:
        self._connections = Connections(client, AbstractConnection, "redis.asyncio.Redis")
        self.server = self._connections.server
        self._stop = stop
        self._free: deque[Any] = deque()
        weakref.finalize(self, _abandon_all, self._free)

    def blocking(self) -> BlockingRedisWire:
        """A wire to the same server that needs no event loop."""
        return BlockingRedisWire(self._connections.blocking_client())

    async def exchange(
        self,
        commands: Sequence[RedisCommand],
        block_ms: int | None = None,
        arrivals: list[float] | None = None,
    ) -> list[Any]:
        """As `BlockingRedisWire.exchange`."""
        replies: list[Any] = []
        blocking = None if block_ms is None else len(commands) - 1
        patience = self._connections.patience(block_ms)
        stop = self._stop or engine_stop() or _NEVER
        connection = self._take()
        try:
            # One limit for everything: the connection's own would cost a task per command.
            async with asyncio.timeout(patience) as limit:
                with _NO_HASTE if stop is _NEVER else stop.hastening(limit):
                    if not connection.is_connected:
                        await connection.connect()
                        connection.loop = asyncio.get_running_loop()
                        connection.look = _look_at(connection)
                        connection.replies = reader_of(connection)
                    await _send(connection, pack(commands))
                    for number in range(len(commands)):
                        if number != blocking:
                            reply = await _read(connection)
                        else:
                            reply = await _wait(connection, stop) if is_worth_waiting(replies) else _NONE_YET
                            if reply is _NONE_YET:
                                _abandon(connection)
                                return [*replies, None]
                        replies.append(reply)
                        if arrivals is not None:
                            arrivals.append(time.perf_counter())
        except BaseException as error:
            _abandon(connection)  # a reply may still be on its way
            if isinstance(error, TimeoutError):
                raise redis.exceptions.TimeoutError(str(error) or _no_reply(patience, stop)) from error
            raise
        self._free.append(connection)
        return replies

    async def close(self) -> None:
        """As `BlockingRedisWire.close`."""
        for connection in drain(self._free):
            if _is_usable(connection):
                with suppress(*FAILURES):
                    await connection.disconnect()
            _abandon(connection)

    def _take(self) -> Any:
        while self._free:
            connection = self._free.pop()
            if _is_usable(connection):
                return connection
            _abandon(connection)
        return self._connections.make(socket_timeout=None)


async def _wait(connection: Any, stop: AsyncStop) -> Any:
    with stop.calling(lambda: _abort(connection)):
        try:
            return _NONE_YET if stop.requested else await _read(connection)
        except FAILURES:
            if stop.requested:
                return _NONE_YET
            raise


def _no_reply(patience: float | None, stop: AsyncStop) -> str:
    if stop.requested and (patience is None or patience > LAST_WAIT):
        return f"no reply within {LAST_WAIT:g} s of stop()"
    return f"no reply in {patience:g} s"


async def _send(connection: Any, packed: bytes) -> None:
    try:
        connection._writer.write(packed)
        await connection._writer.drain()
    except OSError as error:
        raise lost(error) from error


async def _read(connection: Any) -> Any:
    """Return the next reply, error replies as values, except those that say that the connection is of no use."""
    while (reply := connection.replies.gets()) is MORE:
        try:
            data = await connection._reader.read(READ_SIZE)
        except OSError as error:
            raise lost(error) from error
        if not data:
            raise redis.exceptions.ConnectionError("Connection closed by server.")
        connection.replies.feed(data)
    if isinstance(reply, redis.exceptions.ConnectionError):
        raise reply
    return reply


def _is_usable(connection: Any) -> bool:
    """Whether Redis has left it open since its last use, and it belongs to the running event loop."""
    return (
        connection.is_connected
        and connection.loop is asyncio.get_running_loop()
        and not connection._reader.at_eof()
        and not connection._writer.transport.is_closing()
        and not connection.look(0)  # while the event loop was busy, it cannot have noticed
    )


def _look_at(connection: Any) -> Callable[[int], Any]:
    """Return what finds something to read on an idle connection: that it was closed."""
    poll = select.poll()
    poll.register(connection._writer.transport.get_extra_info("socket").fileno(), select.POLLIN)
    return poll.poll


def _abort(connection: Any) -> None:
    """End a wait for a reply."""
    if connection._writer is not None:
        connection._writer.transport.abort()


def _abandon(connection: Any) -> None:
    """Close without waiting, and without an event loop if its own is gone."""
    writer = connection._writer
    connection._reader = connection._writer = None
    if writer is None:
        return
    try:
        writer.transport.abort()
    except RuntimeError:  # its loop is closed and cannot close anything anymore
        sock, writer.transport._sock = getattr(writer.transport, "_sock", None), None
        if sock is not None:
            sock.close()


def _abandon_all(connections: deque[Any]) -> None:
    for connection in connections:
        _abandon(connection)
