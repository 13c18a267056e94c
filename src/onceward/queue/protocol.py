"""A queue in Redis, shared by threads and asyncio: its operations, round trips and commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import NoPermissionError, ResponseError

from onceward._redis.connections import FAILURES, RedisCommand
from onceward._redis.wire import BlockingRedisWire
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward.queue.config import QueueConfig
from onceward.queue.errors import QueueError, UndecodableEntryError
from onceward.queue.messages import FIELD, BacklogStats, Entries, QueueMessage, encode
from onceward.queue.metrics import Count, QueueMetrics

START = b"0-0"
"""Where a sweep of the pending list begins; XAUTOCLAIM returns it at the end."""
INSPECTED = 1000
"""Pending entries that `backlog_stats` inspects at most."""

_GONE = re.compile("NOGROUP|UNBLOCKED.*no longer exists")
"""In a failover, too, Redis unblocks a reader, but then stream and group still exist."""
_GONE_HINT = (
    "; the stream or its group was deleted while this consumer was using it. It was not recreated; calling again "
    "recreates it, and starts at the first entry of the stream"
)
_MISSING_HINT = "; this user may not create groups. Create it: XGROUP CREATE {} {} 0 MKSTREAM"
_UNBLOCKED_HINT = "; the server changed its role, as in a failover. Nothing was read; connect again"


class QueueCore:
    """The operations of a queue, except claims."""

    def __init__(self, group: RedisGroup) -> None:
        self._group = group
        self._commands = group.commands
        self._left_unread: UndecodableEntryError | None = None

    async def enqueue(self, payload: Any) -> str:
        [id_], count = await self._group.ask(self._commands.add(encode(payload)))
        if count is not None:
            count.add("enqueue", 1)
        return str(id_, "ascii")

    async def read(self, block_ms: int, count: int) -> list[QueueMessage]:
        """Return at most `count` new messages.

        Undecodable entries are raised at once if they came alone. If they came with good messages, it returns
        these, and the next read raises the error before it asks Redis for more.
        """
        left, self._left_unread = self._left_unread, None
        if left is not None:
            raise left
        await self._group.create_once()
        [reply], counted = await self._group.ask(self._commands.read(block_ms, count), block_ms=block_ms)
        return self._messages(reply, counted)

    async def ack(self, message: QueueMessage) -> None:
        [acked], count = await self._group.ask(self._commands.ack(message))
        if count is not None:
            count.add("ack", acked)

    async def backlog_stats(self) -> BacklogStats:
        commands = [
            self._commands.length(),
            self._commands.pending_summary(),
            self._commands.pending("-", "+", INSPECTED),
        ]
        replies = await self._group.exchange(commands)
        for number, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                if not str(reply).startswith("NOGROUP"):
                    raise self._group.refusal(commands[number], reply)
                replies[number] = [0] if number == 1 else []  # nothing was ever delivered
        length, summary, oldest = replies
        return BacklogStats(length, summary[0], max((idle for _, _, idle, _ in oldest), default=None))

    def _messages(self, reply: Sequence[Any] | None, count: Count | None) -> list[QueueMessage]:
        if not reply:
            return []
        found = self._group.entries()
        for id_, fields in reply[0][1]:
            found.add(id_, fields, deliveries=1)
        if count is not None:
            count.add("read", len(found.messages), found.flaws)
        messages, left = found.result()
        if left is not None:
            self._left_unread = left
        return messages


class RedisGroup:
    """A consumer group in Redis. Sends each round trip once, counts it, and turns every failure into a `QueueError`."""

    def __init__(self, config: QueueConfig, wire: BlockingRedisWire | AsyncRedisWire) -> None:
        self.config = config
        self.commands = QueueCommands(config)
        self._wire = wire
        self._metrics = QueueMetrics(config)
        self._exists = False
        self._may_create = True

    async def ask(self, *commands: Command, block_ms: int | None = None) -> tuple[list[Any], Count | None]:
        """Return the replies. Raises the first error reply."""
        count = self._metrics.begin()
        arrivals = [] if count is None else count.arrivals
        try:
            replies = await self.exchange(commands, block_ms, arrivals)
        except QueueError:
            if count is not None:
                count.add_failure(commands[len(arrivals)].operation)
            raise
        for number, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                if count is not None:
                    count.add_failure(commands[number].operation)
                raise self.refusal(commands[number], reply)
            if count is not None:
                count.record_duration(commands[number].operation, number)
        return replies, count

    async def exchange(
        self, commands: Sequence[Command], block_ms: int | None = None, arrivals: list[float] | None = None
    ) -> list[Any]:
        """Like the wire's, but raises `QueueError` if Redis is unavailable."""
        arrivals = [] if arrivals is None else arrivals
        try:
            return await self._wire.exchange([command.arguments for command in commands], block_ms, arrivals)
        except FAILURES as error:
            raise QueueError(f"{commands[len(arrivals)].doing} failed: {error}") from error

    async def create_once(self) -> None:
        """Create the group on first use. If it disappears later, the failure must surface."""
        if self._exists:
            return
        command = self.commands.create_group()
        [reply] = await self.exchange([command])
        if isinstance(reply, NoPermissionError):
            self._may_create = False  # it may exist
        elif isinstance(reply, ResponseError) and not str(reply).startswith("BUSYGROUP"):
            raise self.refusal(command, reply)
        self._exists = True  # BUSYGROUP: it existed already, or another consumer was faster

    def refusal(self, command: Command, reply: ResponseError) -> QueueError:
        hint = ""
        if _GONE.match(str(reply)):
            self._exists = False
            where = self.config.stream_key, self.config.consumer_group
            hint = _GONE_HINT if self._may_create else _MISSING_HINT.format(*where)
        elif str(reply).startswith("UNBLOCKED"):
            hint = _UNBLOCKED_HINT
        error = QueueError(f"{command.doing} failed: {reply}{hint}")
        error.__cause__ = reply
        return error

    def entries(self) -> Entries:
        return Entries(self.config.stream_key, self.config.consumer_group)

    def count_claimed(self, found: Entries) -> None:
        count = self._metrics.begin()
        if count is not None:
            count.add("claim", len(found.messages), found.flaws)


class Command(NamedTuple):
    doing: str
    """Its name in errors."""
    arguments: RedisCommand
    operation: str = ""
    """Its name in metrics, if it is counted."""


class QueueCommands:
    """The Redis commands of a queue."""

    def __init__(self, config: QueueConfig) -> None:
        self._stream = config.stream_key
        self._group = config.consumer_group
        self._consumer = config.consumer_name
        self._where = f"stream {self._stream!r}, group {self._group!r}"

    def create_group(self) -> Command:
        """From the beginning of the stream, so entries enqueued before the group existed belong to it, too."""
        arguments = ("XGROUP", "CREATE", self._stream, self._group, "0", "MKSTREAM")
        return Command(f"creating the group on {self._where}", arguments)

    def add(self, body: bytes) -> Command:
        arguments = ("XADD", self._stream, "*", FIELD, body)
        return Command(f"enqueueing to stream {self._stream!r}", arguments, "enqueue")

    def read(self, block_ms: int, count: int) -> Command:
        arguments = (
            "XREADGROUP", "GROUP", self._group, self._consumer, "COUNT", count, "BLOCK", block_ms,
            "STREAMS", self._stream, ">",
        )  # fmt: skip
        return Command(f"reading on {self._where}", arguments, "read")

    def ack(self, message: QueueMessage) -> Command:
        """In the message's own stream and group, which may belong to another queue."""
        doing = f"acknowledging message {message.id} of stream {message.stream!r}, group {message.group!r}"
        return Command(doing, ("XACK", message.stream, message.group, message.id), "ack")

    def autoclaim(self, min_idle_ms: int, start: bytes, count: int) -> Command:
        arguments = (
            "XAUTOCLAIM", self._stream, self._group, self._consumer, min_idle_ms, start, "COUNT", count,
        )  # fmt: skip
        return Command(f"claiming on {self._where}", arguments, "claim")

    def claim(self, min_idle_ms: int, ids: list[bytes]) -> Command:
        arguments = ("XCLAIM", self._stream, self._group, self._consumer, min_idle_ms, *ids)
        return Command(f"claiming on {self._where}", arguments, "claim")

    def entry(self, id_: bytes) -> Command:
        return Command(f"looking for an entry of {self._where}", ("XRANGE", self._stream, id_, id_))

    def pending(self, start: bytes | str, end: bytes | str, count: int) -> Command:
        arguments = ("XPENDING", self._stream, self._group, start, end, count)
        return Command(f"listing pending messages on {self._where}", arguments, "pending")

    def pending_summary(self) -> Command:
        return Command(f"counting pending messages on {self._where}", ("XPENDING", self._stream, self._group))

    def length(self) -> Command:
        return Command(f"measuring stream {self._stream!r}", ("XLEN", self._stream))
