"""One round trip to Redis: sent once, counted, and whatever goes wrong becomes a `QueueError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import ResponseError

from onceward.queue.commands import Command, Commands
from onceward.queue.config import QueueConfig
from onceward.queue.entries import Entries
from onceward.queue.exceptions import QueueError
from onceward.queue.metrics import Count, QueueMetrics

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
