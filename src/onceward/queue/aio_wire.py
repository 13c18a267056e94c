"""Redis from asyncio: send some commands, wait for their replies. What fails is not sent again."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from onceward._redis.connections import FAILURES, Connections, is_worth_waiting
from onceward.queue.errors import QueueError
from onceward.queue.protocol import Command
from onceward.queue.stop import AsyncStop


class AsyncWire:
    """Any number of tasks may use one: each exchange has a connection of its own, kept for the next."""

    def __init__(self, client: Any, stop: AsyncStop) -> None:
        self._connections = Connections(client, AbstractConnection, "redis.asyncio.Redis")
        self._stop = stop
        self._free: deque[_Line] = deque()
        weakref.finalize(self, _abandon_all, self._free)

    async def exchange(
        self, commands: Sequence[Command], block_ms: int | None = None, marks: list[float] | None = None
    ) -> list[Any]:
        """The contract of `Wire.exchange`."""
        patience = self._connections.patience(block_ms)
        blocking = len(commands) - 1 if block_ms is not None else None
        replies: list[Any] = []
        line = self._take()
        try:
            async with asyncio.timeout(patience):
                await line.send(commands)
                for number in range(len(commands)):
                    if number == blocking:
                        reply = await self._reply_unless_stopped(line, is_worth_waiting(replies))
                        if line.aborted:
                            line.abandon()
                            return [*replies, None]
                    else:
                        reply = await line.reply()
                    replies.append(reply)
                    if marks is not None:
                        marks.append(time.perf_counter())
        except FAILURES as error:
            line.abandon()
            reason = str(error) or f"no reply in {patience:g} s"  # asyncio's own time-out has no text
            raise QueueError(f"{commands[len(replies)].doing} failed: {reason}") from error
        except BaseException:
            line.abandon()  # a reply may still be under way in it
            raise
        self._free.append(line)
        return replies

    async def _reply_unless_stopped(self, line: _Line, is_worth_waiting: bool) -> Any:
        with self._stop.calling(line.abort):
            if self._stop.requested or not is_worth_waiting:
                line.abort()
                return None
            try:
                return await line.reply()
            except FAILURES:
                if line.aborted:
                    return None
                raise

    async def close(self) -> None:
        """Close the connections that are not in use. An exchange after this opens a new one."""
        with suppress(IndexError):
            while True:
                await self._free.pop().close()

    def _take(self) -> _Line:
        with suppress(IndexError):
            while True:
                line = self._free.pop()
                if line.is_usable():
                    return line
                line.abandon()
        # The limit is asyncio.timeout's; the connection's own would cost a task a command.
        return _Line(self._connections.make(socket_timeout=None))


class _Line:
    """One connection, of one event loop."""

    __slots__ = ("_connection", "_loop", "aborted")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.aborted = False

    def is_usable(self) -> bool:
        """Whether Redis has left it open meanwhile, and it belongs to the loop that runs."""
        connection = self._connection
        return (
            not self.aborted
            and self._loop is asyncio.get_running_loop()
            and connection.is_connected
            and not connection._reader.at_eof()
            and not connection._writer.transport.is_closing()
        )

    async def send(self, commands: Sequence[Command]) -> None:
        connection = self._connection
        if not connection.is_connected:
            await connection.connect()
        packed = connection.pack_commands([command.arguments for command in commands])
        await connection.send_packed_command(packed, check_health=False)

    async def reply(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error

    def abort(self) -> None:
        """End a wait for a reply."""
        self.aborted = True
        if self._connection._writer is not None:
            self._connection._writer.transport.abort()

    def abandon(self) -> None:
        """Close without waiting, and without an event loop if that is gone."""
        writer = self._connection._writer
        self._connection._reader = self._connection._writer = None
        if writer is None:
            return
        try:
            writer.transport.abort()
        except RuntimeError:  # its loop is closed, and can close nothing any more
            sock, writer.transport._sock = getattr(writer.transport, "_sock", None), None
            if sock is not None:
                sock.close()

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            with suppress(*FAILURES):
                await self._connection.disconnect()
        self.abandon()


def _abandon_all(lines: deque[_Line]) -> None:
    for line in lines:
        line.abandon()
