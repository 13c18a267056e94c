"""The loop of a consumer, shared by threads and asyncio: fetch, deliver, and nothing more after stop()."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ResponseError

from onceward._process.stop import AsyncStop, BlockingStop
from onceward._redis.connections import FAILURES
from onceward.queue.claims import Claims
from onceward.queue.errors import QueueError
from onceward.queue.messages import QueueMessage
from onceward.queue.protocol import START, QueueCore

T = TypeVar("T")

Attempt = Callable[[QueueMessage], Awaitable[BaseException | None]]
"""One session, the handler, the commit. Returns what was raised, because a handler may raise StopIteration."""


class ConsumerLoop:
    def __init__(self, queue: QueueCore, claims: Claims, stop: BlockingStop | AsyncStop) -> None:
        self._queue = queue
        self._claims = claims
        self._stop = stop

    def _is_stopped(self) -> bool:
        return self._stop.requested

    async def _unless_stopped(self, asked: Awaitable[T], nothing: T) -> T:
        """Return the answer. After a stop, an answer that Redis does not give is none: nothing was delivered."""
        try:
            return await asked
        except QueueError as error:
            unanswered = isinstance(error.cause, FAILURES) and not isinstance(error.cause, ResponseError)
            if self._is_stopped() and unanswered:
                return nothing
            raise

    async def next(self, block_ms: int) -> QueueMessage | None:
        if self._is_stopped():
            return None
        messages = await self._unless_stopped(self._queue.read(block_ms, 1), [])
        # A message that arrives during a stop is not delivered; it stays pending.
        return messages[0] if messages and not self._is_stopped() else None

    async def claim_stale(self, min_idle_ms: int, count: int) -> list[QueueMessage]:
        if self._is_stopped():
            return []
        messages, _ = await self._unless_stopped(self._claims.claim(min_idle_ms, count), ([], START))
        return messages

    async def run(self, attempt: Attempt, block_ms: int) -> BaseException | None:
        """Run until stopped, or until an attempt fails: then return its exception, for the caller to raise.

        The next message is read only after the ack has succeeded: a failed ack must not leave one that nobody handles.
        """
        while not self._is_stopped():
            message = await self.next(block_ms)
            if message is None:
                continue
            error = await attempt(message)
            if error is not None:
                return _note(error, message)
            await self._queue.ack(message)
        return None

    async def run_claim_stale(self, attempt: Attempt, min_idle_ms: int, wait_ms: int) -> BaseException | None:
        """Like `run`, for stale messages. Waits after a sweep of the whole pending list that found none."""
        cursor = START
        while not self._is_stopped():
            from_the_start = cursor == START
            messages, cursor = await self._unless_stopped(
                self._claims.claim(min_idle_ms, 1, cursor), ([], START)
            )
            if self._is_stopped():
                return None
            for message in messages:
                error = await attempt(message)
                if error is not None:
                    return _note(error, message)
                await self._queue.ack(message)
            if from_the_start and not messages:
                await self._stop.pause(wait_ms / 1000)
        return None


def _note(error: BaseException, message: QueueMessage) -> BaseException:
    delivery = "" if message.deliveries is None else f", delivery {message.deliveries}"
    error.add_note(
        f"while handling message {message.id} of stream {message.stream!r}, group {message.group!r}{delivery}; "
        "it stays pending"
    )
    return error
