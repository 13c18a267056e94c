"""Redis from threads: send commands together, return their replies. A failed command is not sent again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.connection import AbstractConnection

from onceward._process.stop import BlockingStop, engine_stop
from onceward._redis.connections import Connections, RedisCommand, drain, is_worth_waiting
from onceward._redis.line import RedisLine


class BlockingRedisWire:
    """Threads may share one: each exchange has its own connection, kept for the next."""

    def __init__(self, client: Any, stop: BlockingStop | None = None) -> None:
        self._connections = Connections(client, AbstractConnection, "redis.Redis")
        self.server = self._connections.server
        self._stop = stop
        self._free: deque[RedisLine] = deque()

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
        to an earlier command skips it: the last reply is then None, as if nothing had arrived. After a stop, any other
        reply may take `LAST_WAIT` seconds. `arrivals` collects the time of each reply, so after a failure its length is
        the number of the failed command.
        """
        replies: list[Any] = []
        blocking = None if block_ms is None else len(commands) - 1
        line = self._take()
        try:
            line.send(commands)
            for number in range(len(commands)):
                if number == blocking and not (
                    is_worth_waiting(replies) and line.wait(self._connections.patience(block_ms))
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

    def _take(self) -> RedisLine:
        stop = self._stop or engine_stop()
        while self._free:
            try:
                line = self._free.pop()
            except IndexError:  # another thread was faster
                break
            if line.is_usable():
                line.heed(stop)
                return line
            line.close()
        patience = self._connections.reply_timeout
        return RedisLine(self._connections.make(patience), patience, stop)
