"""Redis from threads: send commands together, return their replies. A failed command is not sent again."""

from __future__ import annotations

import os
import select
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.connection import AbstractConnection
from redis.exceptions import ResponseError, TimeoutError

from onceward._redis.connections import Connections, RedisCommand, drain, is_worth_waiting, pack
from onceward._redis.stop import BlockingStop


class BlockingRedisWire:
    """Threads may share one: each exchange has its own connection, kept for the next."""

    def __init__(self, client: Any, stop: BlockingStop | None = None) -> None:
        self._connections = Connections(client, AbstractConnection, "redis.Redis")
        self.server = self._connections.server
        self._stop = stop
        self._free: deque[_Line] = deque()

    def blocking(self) -> BlockingRedisWire:
        """Another wire to the same server."""
        return BlockingRedisWire(self._connections.blocking_client())

    async def exchange(
        self,
        commands: Sequence[RedisCommand],
        block_ms: int | None = None,
        arrivals: list[float] | None = None,
    ) -> list[Any]:
        """Return the replies in order, error replies as values. Raises one of `FAILURES` if Redis is unavailable.

        With `block_ms` the last command blocks that long in Redis. A stop ends the wait at once, and an error reply
        to an earlier command skips it: the last reply is then None, as if nothing had arrived. `arrivals` collects
        the time of each reply, so after a failure its length is the number of the failed command.
        """
        replies: list[Any] = []
        blocking = None if block_ms is None else len(commands) - 1
        line = self._take()
        try:
            line.send(commands)
            for number in range(len(commands)):
                if number == blocking and not (
                    is_worth_waiting(replies)
                    and line.wait(self._connections.patience(block_ms), after_others=number > 0)
                ):
                    line.close()
                    return [*replies, None]
                replies.append(line.reply())
                if arrivals is not None:
                    arrivals.append(time.perf_counter())
        except BaseException:
            line.close()  # a reply may still be on its way
            raise
        self._free.append(line)
        return replies

    async def close(self) -> None:
        """Close the connections that are not in use. An exchange after this opens a new one."""
        for line in drain(self._free):
            line.close()

    def _take(self) -> _Line:
        for line in drain(self._free):
            if line.is_usable():
                return line
            line.close()
        connection = self._connections.make(self._connections.reply_timeout)
        return _Line(connection, None if self._stop is None else self._stop.fd())


class _Line:
    """One connection that can be waited on together with the stop signal."""

    __slots__ = ("_connection", "_either", "_pid", "_stop_fd", "_this")

    def __init__(self, connection: Any, stop_fd: int | None) -> None:
        self._connection = connection
        self._stop_fd = stop_fd
        self._pid = os.getpid()
        connection.connect()
        sock = connection._sock
        if isinstance(sock, ssl.SSLSocket):
            # After the handshake TLS sends its own messages, which must not be mistaken for a reply.
            connection.send_command("PING", check_health=False)
            connection.read_response()
        self._this = select.poll()
        self._this.register(sock, select.POLLIN)
        self._either = select.poll()
        self._either.register(sock, select.POLLIN)
        if stop_fd is not None:
            self._either.register(stop_fd, select.POLLIN)

    def is_usable(self) -> bool:
        """Whether Redis has left it open since its last use, and it was not inherited in a fork."""
        return self._pid == os.getpid() and not self._this.poll(0)

    def send(self, commands: Sequence[RedisCommand]) -> None:
        self._connection.send_packed_command(pack(commands), check_health=False)

    def reply(self) -> Any:
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error

    def wait(self, seconds: float | None, after_others: bool) -> bool:
        """Wait for a reply. Return False if a stop came first."""
        if after_others and self._connection.can_read(0):
            return True  # it arrived together with the replies before it
        ready = self._either.poll(None if seconds is None else seconds * 1000)
        if not ready:
            raise TimeoutError(f"no reply in {seconds:g} s")
        return all(fd != self._stop_fd for fd, _ in ready)

    def close(self) -> None:
        self._connection.disconnect()
