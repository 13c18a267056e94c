"""One stream, one group, one consumer name: the commands of a queue, without a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from onceward._redis.stop import AsyncStop, Stop
from onceward._redis.wire import BlockingRedisWire
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward._sync import run_blocking
from onceward.queue.claims import Claims
from onceward.queue.config import QueueConfig, check_at_least, check_block_ms
from onceward.queue.messages import BacklogStats, QueueMessage
from onceward.queue.protocol import QueueCore, RedisGroup

if TYPE_CHECKING:
    import redis
    import redis.asyncio


class QueueBase:
    """What queues and consumers share: their parts, and arguments checked and filled in from the configuration."""

    def __init__(
        self, config: QueueConfig, wire: BlockingRedisWire | AsyncRedisWire, stop: Stop | AsyncStop
    ) -> None:
        self.config = config
        self._wire = wire
        self._stop = stop
        group = RedisGroup(config, wire)
        self._core = QueueCore(group)
        self._claims = Claims(group, stop)

    def _block_ms(self, given: int | None) -> int:
        return self.config.block_ms if given is None else check_block_ms(given)

    def _wait_ms(self, given: int | None) -> int:
        return self.config.block_ms if given is None else check_at_least("wait_ms", given, 1)

    def _min_idle_ms(self, given: int | None) -> int:
        return self.config.claim_idle_ms if given is None else check_at_least("min_idle_ms", given, 0)

    def _count(self, given: int) -> int:
        return check_at_least("count", given, 1)


class BlockingQueueBase(QueueBase):
    """What a queue and a consumer for threads share."""

    def backlog_stats(self) -> BacklogStats:
        """Length, pending, oldest idle. One round trip, no side effects, zeros if there is no group."""
        return run_blocking(self._core.backlog_stats())

    def close(self) -> None:
        """Close the connections. Happens by itself when the object is collected."""
        run_blocking(self._wire.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncQueueBase(QueueBase):
    """What a queue and a consumer for asyncio share."""

    async def backlog_stats(self) -> BacklogStats:
        return await self._core.backlog_stats()

    async def close(self) -> None:
        await self._wire.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class RedisStreamsQueue(BlockingQueueBase):
    """Threads may share one. Every failure of Redis is a `QueueError`; nothing is tried twice.

    It uses connections of its own to where `redis` connects, and leaves that client alone. The group is created
    by the first `read` or `claim_stale`, at the beginning of the stream.
    """

    def __init__(self, redis: redis.Redis, config: QueueConfig) -> None:
        stop = Stop()  # never requested: only a consumer stops
        super().__init__(config, BlockingRedisWire(redis, stop), stop)

    def enqueue(self, payload: Any) -> str:
        """Add a message and return its id. Raises `QueuePayloadError` if JSON cannot carry the payload.

        After a `QueueError` it is unknown whether the message was added.
        """
        return run_blocking(self._core.enqueue(payload))

    def read(self, block_ms: int | None = None, count: int = 1) -> list[QueueMessage]:
        """At most `count` new messages, as soon as there is one; an empty list if none arrives in `block_ms`.

        Entries that cannot be decoded are raised as `UndecodableEntryError`: at once if they came alone, by the
        next `read` if they came along with messages, which are returned. They stay pending.
        """
        return run_blocking(self._core.read(self._block_ms(block_ms), self._count(count)))

    def ack(self, msg: QueueMessage) -> None:
        """Take a message off the pending list. Idempotent."""
        run_blocking(self._core.ack(msg))

    def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]:
        """At most `count` messages that have been pending for `min_idle_ms`, now delivered to this consumer.

        Searches the whole pending list if needed. Entries trimmed from the stream are skipped; those that
        cannot be decoded are raised as by `read`.
        """
        claim = self._claims.claim(self._min_idle_ms(min_idle_ms), self._count(count))
        return run_blocking(claim)[0]


class AsyncRedisStreamsQueue(AsyncQueueBase):
    """`RedisStreamsQueue` for asyncio: the same methods, awaited. Tasks may share one.

    A call that is cancelled has an unknown outcome: what it had read or claimed stays pending.
    """

    def __init__(self, redis: redis.asyncio.Redis, config: QueueConfig) -> None:
        stop = AsyncStop()
        super().__init__(config, AsyncRedisWire(redis, stop), stop)

    async def enqueue(self, payload: Any) -> str:
        return await self._core.enqueue(payload)

    async def read(self, block_ms: int | None = None, count: int = 1) -> list[QueueMessage]:
        return await self._core.read(self._block_ms(block_ms), self._count(count))

    async def ack(self, msg: QueueMessage) -> None:
        await self._core.ack(msg)

    async def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]:
        claim = self._claims.claim(self._min_idle_ms(min_idle_ms), self._count(count))
        return (await claim)[0]
