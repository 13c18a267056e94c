"""The Redis commands of a queue, each with the words an error says it in."""

from __future__ import annotations

from typing import Any, NamedTuple

from onceward.queue.config import QueueConfig
from onceward.queue.message import QueueMessage

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
