"""Redis from threads: send some commands, wait for their replies. What fails is not sent again."""

from __future__ import annotations

import os
import select
import ssl
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.connection import AbstractConnection
from redis.exceptions import ResponseError

from onceward._redis.connections import FAILURES, Connections, is_worth_waiting
from onceward.queue.errors import QueueError
from onceward.queue.protocol import Command
from onceward.queue.stop import Stop


class Wire:
    """Any number of threads may use one: each exchange has a connection of its own, kept for the next."""

    def __init__(self, client: Any, stop: Stop) -> None:
        self._connections = Connections(client, AbstractConnection, "redis.Redis")
        self._stop = stop
        self._free: deque[_Line] = deque()

    async def exchange(
        self, commands: Sequence[Command], block_ms: int | None = None, marks: list[float] | None = None
    ) -> list[Any]:
        """The replies in order, error replies as values; raises `QueueError` when Redis is not to be had.

        With `block_ms` the last command blocks that long in Redis. A stop ends the wait, and when a command before
        it was refused there is none: its reply is then None, as if nothing had come. `marks` is given the time
        of each reply.
        """
        replies: list[Any] = []
        blocking = len(commands) - 1 if block_ms is not None else None
        line: _Line | None = None
        try:
            line = self._take()
            line.send(commands)
            for number in range(len(commands)):
                if number == blocking and not (
                    is_worth_waiting(replies)
                    and line.wait(self._connections.patience(block_ms), after_others=number > 0)
                ):
                    line.close()
                    return [*replies, None]
                replies.append(line.reply())
                if marks is not None:
                    marks.append(time.perf_counter())
        except FAILURES as error:
            if line is not None:
                line.close()
            raise QueueError(f"{commands[len(replies)].doing} failed: {error}") from error
        except BaseException:
            if line is not None:
                line.close()  # a reply may still be under way in it
            raise
        self._free.append(line)
        return replies

    async def close(self) -> None:
        """Close the connections that are not in use. An exchange after this opens a new one."""
        with suppress(IndexError):
            while True:
                self._free.pop().close()

    def _take(self) -> _Line:
        with suppress(IndexError):
            while True:
                line = self._free.pop()
                if line.is_usable():
                    return line
                line.close()
        return _Line(self._connections.make(self._connections.reply_timeout), self._stop.fd())


class _Line:
    """One connection, and what it takes to wait on it and on the stop signal at the same time."""

    __slots__ = ("_connection", "_either", "_pid", "_stop_fd", "_this")

    def __init__(self, connection: Any, stop_fd: int) -> None:
        self._connection = connection
        self._stop_fd = stop_fd
        self._pid = os.getpid()
        connection.connect()
        sock = connection._sock
        if isinstance(sock, ssl.SSLSocket):
            # TLS has messages of its own after the handshake, which must not look like a reply.
            connection.send_command("PING", check_health=False)
            connection.read_response()
        self._this = select.poll()
        self._this.register(sock, select.POLLIN)
        self._either = select.poll()
        self._either.register(sock, select.POLLIN)
        self._either.register(stop_fd, select.POLLIN)

    def is_usable(self) -> bool:
        """Whether Redis has left it open meanwhile, and no fork has made it another's."""
        return self._pid == os.getpid() and not self._this.poll(0)

    def send(self, commands: Sequence[Command]) -> None:
        packed = self._connection.pack_commands([command.arguments for command in commands])
        self._connection.send_packed_command(packed, check_health=False)

    def reply(self) -> Any:
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error

    def wait(self, seconds: float | None, after_others: bool) -> bool:
        """Until there is a reply. False if a stop came first."""
        if after_others and self._connection.can_read(0):
            return True  # it came along with the replies before it
        ready = self._either.poll(None if seconds is None else seconds * 1000)
        if not ready:
            raise TimeoutError(f"no reply in {seconds:g} s")
        return all(fd != self._stop_fd for fd, _ in ready)

    def close(self) -> None:
        self._connection.disconnect()
