"""What a queue does, once for threads and asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from redis.exceptions import ResponseError

from onceward.queue import messages
from onceward.queue.config import QueueConfig
from onceward.queue.errors import QueueError, UndecodableEntryError
from onceward.queue.messages import BacklogStats, Entries, QueueMessage
from onceward.queue.metrics import Count, QueueMetrics

# The Redis commands of a queue, each with the words an error says it in.


START = b"0-0"
"""Where a sweep of the pending list begins, and what XAUTOCLAIM says at its end."""


class Command(NamedTuple):
    doing: str
    arguments: tuple[Any, ...]


class Commands:
    def __init__(self, config: QueueConfig) -> None:
        self._stream = config.stream_key
        self._group = config.consumer_group
        self._consumer = config.consumer_name
        self._where = f"stream {self._stream!r}, group {self._group!r}"

    def create_group(self) -> Command:
        """From the beginning of the stream: what was enqueued before the group existed belongs to it too."""
        return self._command(
            "creating the group", "XGROUP", "CREATE", self._stream, self._group, "0", "MKSTREAM"
        )

    def add(self, body: bytes) -> Command:
        return Command(f"enqueueing to stream {self._stream!r}", ("XADD", self._stream, "*", b"data", body))

    def read(self, block_ms: int, count: int) -> Command:
        return self._command(
            "reading", "XREADGROUP", "GROUP", self._group, self._consumer, "COUNT", count, "BLOCK", block_ms,
            "STREAMS", self._stream, ">",
        )  # fmt: skip

    def ack(self, message: QueueMessage) -> Command:
        """Where the message came from, whichever queue is asked."""
        return Command(
            f"acknowledging message {message.id} of stream {message.stream!r}, group {message.group!r}",
            ("XACK", message.stream, message.group, message.id),
        )

    def autoclaim(self, min_idle_ms: int, start: bytes, count: int) -> Command:
        return self._command(
            "claiming", "XAUTOCLAIM", self._stream, self._group, self._consumer, min_idle_ms, start,
            "COUNT", count,
        )  # fmt: skip

    def claim(self, min_idle_ms: int, ids: list[bytes]) -> Command:
        return self._command(
            "claiming", "XCLAIM", self._stream, self._group, self._consumer, min_idle_ms, *ids
        )

    def pending(self, start: bytes | str, end: bytes | str, count: int) -> Command:
        return self._command(
            "listing what is pending", "XPENDING", self._stream, self._group, start, end, count
        )

    def pending_summary(self) -> Command:
        return self._command("counting what is pending", "XPENDING", self._stream, self._group)

    def length(self) -> Command:
        return Command(f"measuring stream {self._stream!r}", ("XLEN", self._stream))

    def _command(self, doing: str, *arguments: Any) -> Command:
        return Command(f"{doing} on {self._where}", arguments)


# One round trip to Redis: sent once, counted, and whatever goes wrong becomes a `QueueError`.


_GONE = ("NOGROUP", "UNBLOCKED")


class WireLike(Protocol):
    """The port: `Wire` blocks, `AsyncWire` awaits."""

    async def exchange(
        self, commands: Sequence[Command], block_ms: int | None = None, marks: list[float] | None = None
    ) -> list[Any]: ...

    async def close(self) -> None: ...


class RedisSide:
    def __init__(self, config: QueueConfig, wire: WireLike) -> None:
        self.config = config
        self.commands = Commands(config)
        self.wire = wire
        self._metrics = QueueMetrics(config)
        self._has_group = False

    async def ask(
        self, *steps: tuple[str, Command], block_ms: int | None = None
    ) -> tuple[list[Any], Count | None]:
        """Each step is an operation's name and its command. Error replies are raised, the first one first."""
        count = self._metrics.begin()
        marks = None if count is None else count.marks
        try:
            replies = await self.wire.exchange([command for _, command in steps], block_ms, marks)
        except QueueError:
            if count is not None:
                count.failed(steps[len(count.marks)][0])
            raise
        for number, reply in enumerate(replies):
            operation, command = steps[number]
            if isinstance(reply, ResponseError):
                if count is not None:
                    count.failed(operation)
                raise self.refused(command, reply)
            if count is not None:
                count.took(operation, number)
        return replies, count

    def count_claimed(self, found: Entries) -> None:
        count = self._metrics.begin()
        if count is not None:
            count.counted("claim", len(found.messages))
            count.undecodable(found.flaws)

    async def ensure_group(self) -> None:
        """Create the group, once: if it disappears later, that is a failure to be seen."""
        if self._has_group:
            return
        command = self.commands.create_group()
        [reply] = await self.wire.exchange([command])
        if isinstance(reply, ResponseError) and not str(reply).startswith("BUSYGROUP"):
            raise self.refused(command, reply)
        self._has_group = True  # BUSYGROUP: there already, or another was quicker

    def refused(self, command: Command, reply: ResponseError) -> QueueError:
        hint = ""
        if str(reply).startswith(_GONE):
            self._has_group = False
            hint = (
                "; the stream or its group was deleted after this consumer had begun. Nothing was created in "
                "its place; calling again does so, and begins at the first entry of the stream"
            )
        error = QueueError(f"{command.doing} failed: {reply}{hint}")
        error.__cause__ = reply
        return error


LOOKED_AT = 1000
"""Pending entries that `backlog_stats` looks at, at most."""


class QueueCore:
    def __init__(self, redis: RedisSide) -> None:
        self._redis = redis
        self._commands = redis.commands
        self._left_unread: UndecodableEntryError | None = None

    async def enqueue(self, payload: Any) -> str:
        command = self._commands.add(messages.encode(payload))
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
