"""The honest loop: at-least-once, acknowledged by you, nothing retried, nothing hidden, nothing in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from onceward._redis.stop import AsyncStop, Stop
from onceward._redis.wire import BlockingRedisWire
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward._sync import run_blocking
from onceward.queue.config import QueueConfig
from onceward.queue.loop import ConsumerLoop
from onceward.queue.messages import QueueMessage
from onceward.queue.queue import AsyncQueueBase, BlockingQueueBase, QueueBase

if TYPE_CHECKING:
    import redis
    import redis.asyncio
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession, DbSession

    Handler = Callable[[QueueMessage, DbSession], None]
    AsyncHandler = Callable[[QueueMessage, AsyncDbSession], Awaitable[None]]


class _ConsumerBase(QueueBase):
    """What both consumers share."""

    def __init__(
        self, config: QueueConfig, wire: BlockingRedisWire | AsyncRedisWire, stop: Stop | AsyncStop
    ) -> None:
        super().__init__(config, wire, stop)
        self._loop = ConsumerLoop(self._core, self._claims, stop)

    def stop(self) -> None:
        """End every wait now and begin nothing new, permanently. Safe in a signal handler and from any thread.

        Messages in flight stay pending until you `ack` them, which still works. A message that Redis delivers at
        this very moment stays pending too.
        """
        self._stop.request()


class QueueConsumer(_ConsumerBase, BlockingQueueBase):
    """Consumes one stream in a group, one message at a time.

    Redis failures are `QueueError`s, raised at once; the call after one starts afresh. Undecodable entries are
    `UndecodableEntryError`s and stay pending. It uses connections of its own to where `redis` connects.
    """

    def __init__(self, redis: redis.Redis, config: QueueConfig) -> None:
        stop = Stop()
        super().__init__(config, BlockingRedisWire(redis, stop), stop)

    def next(self, block_ms: int | None = None) -> QueueMessage | None:
        """The next new message, or None if none arrived within `block_ms`, or after `stop()`."""
        return run_blocking(self._loop.next(self._block_ms(block_ms)))

    def iter_messages(self) -> Iterator[QueueMessage]:
        """New messages until `stop()`. You `ack` each; one that you do not stays pending."""
        while not self._stop.requested:
            message = self.next()
            if message is not None:
                yield message

    def ack(self, msg: QueueMessage) -> None:
        """Take a message off the pending list; works after `stop()` too. Idempotent."""
        run_blocking(self._core.ack(msg))

    def run(self, *, handler: Handler, engine: Engine) -> None:
        """Until `stop()`: fetch a message, `handler(msg, session)` in one transaction, commit, acknowledge.

        Whatever the handler or the commit raises is raised here, the same object with a note that names the
        message: rolled back, not acknowledged, not retried. An ack that fails after the commit is a `QueueError`,
        and the message will be delivered again: the handler must be idempotent.
        """
        from onceward.db.handlers import attempts  # needs SQLAlchemy, which the other methods do not

        _raise(run_blocking(self._loop.run(attempts(handler, engine), self.config.block_ms)))

    def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]:
        """At most `count` messages that have been pending for `min_idle_ms`, now delivered to this consumer.

        Never called by the other methods. Nothing after `stop()`.
        """
        return run_blocking(self._loop.claim_stale(self._min_idle_ms(min_idle_ms), self._count(count)))

    def run_claim_stale(
        self,
        *,
        handler: Handler,
        engine: Engine,
        min_idle_ms: int | None = None,
        wait_ms: int | None = None,
    ) -> None:
        """`run` for stale messages, until `stop()`: one claimed at a time, without a pause while there are any.

        Waits `wait_ms`, by default `block_ms`, when nothing is stale.
        """
        from onceward.db.handlers import attempts

        run = self._loop.run_claim_stale(
            attempts(handler, engine), self._min_idle_ms(min_idle_ms), self._wait_ms(wait_ms)
        )
        _raise(run_blocking(run))


class AsyncQueueConsumer(_ConsumerBase, AsyncQueueBase):
    """`QueueConsumer` for asyncio: the same methods and rules, awaited; handlers are coroutine functions.

    A call that is cancelled has an unknown outcome: what it had read or claimed stays pending.
    """

    def __init__(self, redis: redis.asyncio.Redis, config: QueueConfig) -> None:
        stop = AsyncStop()
        super().__init__(config, AsyncRedisWire(redis, stop), stop)

    async def next(self, block_ms: int | None = None) -> QueueMessage | None:
        return await self._loop.next(self._block_ms(block_ms))

    async def iter_messages(self) -> AsyncIterator[QueueMessage]:
        while not self._stop.requested:
            message = await self.next()
            if message is not None:
                yield message

    async def ack(self, msg: QueueMessage) -> None:
        await self._core.ack(msg)

    async def run(self, *, handler: AsyncHandler, engine: AsyncEngine) -> None:
        from onceward.db.handlers import async_attempts

        _raise(await self._loop.run(async_attempts(handler, engine), self.config.block_ms))

    async def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]:
        return await self._loop.claim_stale(self._min_idle_ms(min_idle_ms), self._count(count))

    async def run_claim_stale(
        self,
        *,
        handler: AsyncHandler,
        engine: AsyncEngine,
        min_idle_ms: int | None = None,
        wait_ms: int | None = None,
    ) -> None:
        from onceward.db.handlers import async_attempts

        run = self._loop.run_claim_stale(
            async_attempts(handler, engine), self._min_idle_ms(min_idle_ms), self._wait_ms(wait_ms)
        )
        _raise(await run)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
