"""One stream, one group, one consumer name: the operations of a queue for asyncio, without a loop."""

# make faces writes queue.py, with
#   run_blocking: self._core, self._claims, self._wire
#   text: "A call that is canceled … stay pending." → ""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from onceward._process.stop import AsyncStop
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward.queue.config import QueueConfig
from onceward.queue.messages import BacklogStats, QueueMessage
from onceward.queue.parts import QueueParts

if TYPE_CHECKING:
    import redis.asyncio


class AsyncQueueBase(QueueParts):
    """What a queue and a consumer for asyncio share."""

    async def backlog_stats(self) -> BacklogStats:
        """Return length, pending, oldest idle. One round trip, no side effects, zeros if there is no group."""
        return await self._core.backlog_stats()

    async def close(self) -> None:
        """Close the connections. Happens by itself when the object is garbage-collected."""
        await self._wire.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncRedisStreamsQueue(AsyncQueueBase):
    """A queue on a Redis stream, for asyncio. Every failure of Redis is a `QueueError`; nothing is tried twice.

    It opens its own connections to where `redis` connects, and leaves that client alone. The first `read` or
    `claim_stale` creates the group, at the beginning of the stream. Tasks may share one.

    A call that is canceled has an unknown outcome: messages that it had read or claimed stay pending.
    """

    def __init__(self, redis: redis.asyncio.Redis, config: QueueConfig) -> None:
        stop = AsyncStop()  # never requested: only a consumer stops
        super().__init__(config, AsyncRedisWire(redis, stop), stop)

    async def enqueue(self, payload: Any) -> str:
        """Add a message and return its id. Raises `QueuePayloadError` if JSON cannot carry the payload.

        After a `QueueError` it is unknown whether the message was added.
        """
        return await self._core.enqueue(payload)

    async def read(self, block_ms: int | None = None, count: int = 1) -> list[QueueMessage]:
        """Return at most `count` new messages, as soon as there is one; an empty list if none arrives in `block_ms`.

        Entries that cannot be decoded are raised as `UndecodableEntryError`: at once if they came alone; by the
        next `read` if they came with messages, which are returned. They stay pending.
        """
        return await self._core.read(self._block_ms(block_ms), self._count(count))

    async def ack(self, msg: QueueMessage) -> None:
        """Take a message off the pending list. Idempotent."""
        await self._core.ack(msg)

    async def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]:
        """Take over at most `count` messages that have been pending for `min_idle_ms`.

        Searches the whole pending list if needed. Entries trimmed from the stream are skipped; those that
        cannot be decoded are raised as by `read`.
        """
        claimed, _ = await self._claims.claim(self._min_idle_ms(min_idle_ms), self._count(count))
        return claimed
