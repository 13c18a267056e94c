"""The connector in threads and in asyncio: two ways to send the commands of one `StreamQueue`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import redis
import redis.asyncio

from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.redis_streams.client import own_client
from onceward.connectors.redis_streams.coalesce import AsyncCoalescer, Coalescer
from onceward.connectors.redis_streams.core import Command, Exchange, StreamQueue
from onceward.connectors.rules import DeadLetter, LeaseRules, OnFailure
from onceward.settlement import Settlement, Verdict
from onceward.transaction import Transaction


class _Base:
    """What both share: the settings. See `LeaseRules` for what they mean.

    A failed message comes back after at most `lease`, also where the doubled `redelivery_delay` is longer.
    `maxlen` trims the stream, roughly, when something is dispatched; None leaves that to you. Entries that are
    trimmed before they are done become dead letters without a body.
    """

    def __init__(
        self,
        redis: Any,
        stream: str,
        group: str = "onceward",
        *,
        lease: float = 60.0,
        max_deliveries: int = 5,
        redelivery_delay: float = 1.0,
        on_failure: OnFailure = "auto",
        maxlen: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules = LeaseRules(
            lease=lease,
            max_deliveries=max_deliveries,
            redelivery_delay=redelivery_delay,
            on_failure=on_failure,
        )
        self.lease = lease
        self._queue = StreamQueue(stream, group, rules, maxlen, clock)
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosedError(
                f"the connector to {self._queue.stream} is closed; make a new one to go on"
            )

    def _check(self, extra: dict[str, Any]) -> None:
        if extra:
            raise TypeError(f"{type(self).__name__} has no fetch option {', '.join(map(repr, extra))}")


class RedisStreamsConnector(_Base):
    """`RedisStreamsConnector("redis://localhost", "orders")`: the `Connector` contract on a stream."""

    def __init__(self, redis: Any, stream: str, group: str = "onceward", **settings: Any) -> None:
        super().__init__(redis, stream, group, **settings)
        self._client = own_client(redis, _SYNC)
        self._out = Coalescer(lambda entries: self._perform(self._queue.append(entries)))

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """New entries, and those whose consumer is gone: at once when idle, a bounded share when busy."""
        self._check(extra)
        return self._perform(self._queue.fetch(batch_size))  # type: ignore[no-any-return]

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Append these to the stream, all or none. What several threads dispatch at once travels together."""
        self._check_open()
        self._out.send(self._queue.entries(transactions))

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        """Acknowledge, delay, give back or bury, in one round trip."""
        self._perform(self._queue.settle(settlements))

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Start the idle time of these deliveries anew."""
        self._perform(self._queue.extend(transactions))

    def counts(self) -> dict[str, int]:
        """How many messages are `ready`, `leased`, `delayed` and `dead` now, each up to ten thousand."""
        return self._perform(self._queue.counts())  # type: ignore[no-any-return]

    def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """The dead letters, longest dead first."""
        return self._perform(self._queue.dead_letters(limit))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close our connections; the given client's are untouched. Idempotent."""
        self._closed = True
        self._client.close()
        self._client.connection_pool.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _perform(self, exchange: Exchange) -> Any:
        if self._closed:
            raise ConnectorClosedError(
                f"the connector to {self._queue.stream} is closed; make a new one to go on"
            )
        replies: Any = None
        try:
            while True:
                replies = self._send(exchange.send(replies))
        except StopIteration as end:
            return end.value

    def _send(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [self._client.execute_command(*commands[0])]
            except _REFUSED as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline.execute(raise_on_error=False)  # type: ignore[no-any-return]


class AsyncRedisStreamsConnector(_Base):
    """The same for asyncio."""

    def __init__(self, redis: Any, stream: str, group: str = "onceward", **settings: Any) -> None:
        super().__init__(redis, stream, group, **settings)
        self._client = own_client(redis, _ASYNC)
        self._out = AsyncCoalescer(lambda entries: self._perform(self._queue.append(entries)))

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """As `RedisStreamsConnector.fetch_transactions`. Cancelled, it gives back what it took."""
        self._check(extra)
        fetching = asyncio.ensure_future(self._perform(self._queue.fetch(batch_size)))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            taken = await fetching
            if taken:
                await self._perform(
                    self._queue.settle([Settlement(transaction, Verdict.RETURNED) for transaction in taken])
                )
            raise

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `RedisStreamsConnector.dispatch_transactions`."""
        self._check_open()
        await self._out.send(self._queue.entries(transactions))

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """As `RedisStreamsConnector.settle_transactions`."""
        await self._perform(self._queue.settle(settlements))

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `RedisStreamsConnector.extend_transactions`."""
        await self._perform(self._queue.extend(transactions))

    async def counts_async(self) -> dict[str, int]:
        """As `RedisStreamsConnector.counts`."""
        return await self._perform(self._queue.counts())  # type: ignore[no-any-return]

    async def dead_letters_async(self, limit: int = 100) -> list[DeadLetter]:
        """As `RedisStreamsConnector.dead_letters`."""
        return await self._perform(self._queue.dead_letters(limit))  # type: ignore[no-any-return]

    async def close_async(self) -> None:
        """As `RedisStreamsConnector.close`."""
        self._closed = True
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()

    async def _perform(self, exchange: Exchange) -> Any:
        if self._closed:
            raise ConnectorClosedError(
                f"the connector to {self._queue.stream} is closed; make a new one to go on"
            )
        replies: Any = None
        try:
            while True:
                replies = await self._send(exchange.send(replies))
        except StopIteration as end:
            return end.value

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [await self._client.execute_command(*commands[0])]
            except _REFUSED as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return await pipeline.execute(raise_on_error=False)  # type: ignore[no-any-return]


_SYNC = redis.Redis
_ASYNC = redis.asyncio.Redis
_REFUSED = redis.ResponseError
