"""The honest loop for asyncio: at-least-once, acknowledged by you, nothing retried, nothing in the background."""

# make faces writes consumer.py, with
#   run_blocking: self._core, self._loop
#   text: "A call that is canceled … stay pending." → ""
#   text: " Handlers are coroutine functions." → ""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from onceward._process.forks import end_child, forks
from onceward._process.stop import AsyncStop
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward.queue.config import QueueConfig
from onceward.queue.loop import ConsumerLoop
from onceward.queue.messages import QueueMessage
from onceward.queue.queue_asyncio import AsyncQueueBase

if TYPE_CHECKING:
    import redis.asyncio
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession

    AsyncHandler = Callable[[QueueMessage, AsyncDbSession], Awaitable[None]]


class AsyncQueueConsumer(AsyncQueueBase):
    """Consumes one stream in a group, one message at a time, in asyncio. Handlers are coroutine functions.

    Redis failures are `QueueError`s, raised at once; the call after one starts fresh. Undecodable entries are
    `UndecodableEntryError`s and stay pending. It opens its own connections to where `redis` connects.

    A call that is canceled has an unknown outcome: messages that it had read or claimed stay pending.
    """

    def __init__(self, redis: redis.asyncio.Redis, config: QueueConfig) -> None:
        stop = AsyncStop()
        super().__init__(config, AsyncRedisWire(redis, stop), stop)
        self._loop = ConsumerLoop(self._core, self._claims, stop)

    def stop(self) -> None:
        """End every wait now and begin nothing new, permanently. Safe in a signal handler and from any thread.

        Messages in flight stay pending until you `ack` them, which still works. A message that Redis delivers at
        this very moment stays pending, too.
        """
        self._stop.request()

    async def next(self, block_ms: int | None = None) -> QueueMessage | None:
        """Return the next new message, or None if none arrived within `block_ms`, or after `stop()`."""
        return await self._loop.next(self._block_ms(block_ms))

    async def iter_messages(self) -> AsyncIterator[QueueMessage]:
        """Yield new messages until `stop()`. `ack` each yourself; one that you do not `ack` stays pending.

        A process that is forked in the loop ends at its next step: it would be a second consumer.
        """
        while not self._stop.requested:
            message = await self.next()
            if message is not None:
                generation = forks.generation
                yield message
                if forks.generation != generation:
                    end_child("a loop over iter_messages()")

    async def ack(self, msg: QueueMessage) -> None:
        """Take a message off the pending list; also works after `stop()`. Idempotent."""
        await self._core.ack(msg)

    async def run(self, *, handler: AsyncHandler, engine: AsyncEngine) -> None:
        """Until `stop()`: fetch a message, `await handler(msg, session)` in one transaction, commit, acknowledge.

        Whatever the handler or the commit raises is raised here, the same object with a note that names the
        message: rolled back, not acknowledged, not retried. An ack that fails after the commit is a `QueueError`,
        and the message will be delivered again, so the handler must be idempotent.
        """
        from onceward.db.handlers import async_attempts  # needs SQLAlchemy, which the other methods do not

        error = await self._loop.run(async_attempts(handler, engine), self.config.block_ms)
        if error is not None:
            raise error

    async def claim_stale(self, min_idle_ms: int | None = None, count: int = 10) -> list[QueueMessage]:
        """Take over at most `count` messages that have been pending for `min_idle_ms`; none after `stop()`.

        The other methods never call this.
        """
        return await self._loop.claim_stale(self._min_idle_ms(min_idle_ms), self._count(count))

    async def run_claim_stale(
        self,
        *,
        handler: AsyncHandler,
        engine: AsyncEngine,
        min_idle_ms: int | None = None,
        wait_ms: int | None = None,
    ) -> None:
        """`run` for stale messages, until `stop()`: claims one at a time, without a pause while there are any.

        Waits `wait_ms`, by default `block_ms`, when nothing is stale.
        """
        from onceward.db.handlers import async_attempts

        error = await self._loop.run_claim_stale(
            async_attempts(handler, engine), self._min_idle_ms(min_idle_ms), self._wait_ms(wait_ms)
        )
        if error is not None:
            raise error
