"""What a queue does, once for threads and asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from onceward.queue import entries
from onceward.queue.entries import Entries
from onceward.queue.exceptions import UndecodableEntryError
from onceward.queue.message import BacklogStats, QueueMessage
from onceward.queue.redis_side import RedisSide

LOOKED_AT = 1000
"""Pending entries that `backlog_stats` looks at, at most."""


class QueueCore:
    def __init__(self, redis: RedisSide) -> None:
        self._redis = redis
        self._commands = redis.commands
        self._left_unread: UndecodableEntryError | None = None

    async def enqueue(self, payload: Any) -> str:
        command = self._commands.add(entries.encode(payload))
        [id_], count = await self._redis.ask(("enqueue", command))
        if count is not None:
            count.counted("enqueue", 1)
        return str(id_, "ascii")

    async def read(self, block_ms: int, count: int) -> list[QueueMessage]:
        """New messages, at most `count`.

        What cannot be decoded is raised at once when it came alone. When it came along with good messages
        these are returned, and it is raised by the next read, before that asks Redis for more.
        """
        left, self._left_unread = self._left_unread, None
        if left is not None:
            raise left
        await self._redis.ensure_group()
        [reply], counted = await self._redis.ask(
            ("read", self._commands.read(block_ms, count)), block_ms=block_ms
        )
        return self._sorted(reply, counted)

    async def ack_and_read_next(self, message: QueueMessage, block_ms: int) -> QueueMessage | None:
        """`ack`, then `read` of one message, in one round trip. A failed ack is raised, whatever was read."""
        replies, count = await self._redis.ask(
            ("ack", self._commands.ack(message)),
            ("read", self._commands.read(block_ms, 1)),
            block_ms=block_ms,
        )
        if count is not None:
            count.counted("ack", replies[0])
        messages = self._sorted(replies[1], count)
        return messages[0] if messages else None

    async def ack(self, message: QueueMessage) -> None:
        [acked], count = await self._redis.ask(("ack", self._commands.ack(message)))
        if count is not None:
            count.counted("ack", acked)

    async def backlog_stats(self) -> BacklogStats:
        commands = [
            self._commands.length(),
            self._commands.pending_summary(),
            self._commands.pending("-", "+", LOOKED_AT),
        ]
        replies = await self._redis.wire.exchange(commands)
        for number, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                if not str(reply).startswith("NOGROUP"):
                    raise self._redis.refused(commands[number], reply)
                replies[number] = [0] if number == 1 else []  # nothing was ever delivered
        length, summary, oldest = replies
        return BacklogStats(length, summary[0], max((idle for _, _, idle, _ in oldest), default=None))

    def _sorted(self, reply: Sequence[Any] | None, count: Any) -> list[QueueMessage]:
        if not reply:
            return []
        config = self._redis.config
        found = Entries(config.stream_key, config.consumer_group)
        for id_, fields in reply[0][1]:
            found.add(id_, fields, deliveries=1)
        if count is not None:
            count.counted("read", len(found.messages))
            count.undecodable(found.flaws)
        if found.flaws:
            error = found.error()
            if not found.messages:
                raise error
            self._left_unread = error
        return found.messages
