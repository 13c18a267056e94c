"""The connector in threads and in asyncio: two ways to send the commands of one `StreamQueue`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from onceward._redis.wire import BlockingRedisWire
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward._sync import run_blocking
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.lease_rules import DeadLetter, Exhumed, LeaseRules, OnFailure
from onceward.connectors.redis_streams.batches import AsyncCoalescer, Coalescer
from onceward.connectors.redis_streams.protocol import Exchange, StreamQueue
from onceward.errors import ConfigurationError
from onceward.transaction import Settlement, Transaction, Verdict

_log = logging.getLogger(__name__)


class _Base:
    """What both share: the settings, and how commands are sent. See `LeaseRules` for what the settings mean.

    A failed or postponed message comes back after at most `lease`, even if its delay is longer.
    `maxlen` trims the stream, roughly, when something is dispatched; None leaves that to you. Entries that are
    trimmed before they are done become dead letters without a body.
    """

    def __init__(
        self,
        wire: BlockingRedisWire | AsyncRedisWire,
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
        self._wire = wire
        self._queue = StreamQueue(wire.server, stream, group, rules, maxlen, clock)
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosedError(
                f"the connector to {self._queue.stream} is closed; make a new one to go on"
            )

    def _check(self, extra: dict[str, Any]) -> None:
        if extra:
            raise TypeError(f"{type(self).__name__} has no fetch option {', '.join(map(repr, extra))}")

    async def _perform(self, exchange: Exchange) -> Any:
        self._check_open()
        replies: Any = None
        try:
            while True:
                replies = await self._wire.exchange(exchange.send(replies))
        except StopIteration as end:
            return end.value
        finally:
            if self._closed:  # closed while this used a connection
                await self._wire.close()


class RedisStreamsConnector(_Base):
    """`RedisStreamsConnector("redis://localhost", "orders")`: the `Connector` contract on a stream."""

    def __init__(self, redis: Any, stream: str, group: str = "onceward", **settings: Any) -> None:
        super().__init__(BlockingRedisWire(_client(redis, Redis)), stream, group, **settings)
        self._out = Coalescer(lambda entries: run_blocking(self._perform(self._queue.append(entries))))

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """New entries, and those whose consumer is gone: at once when idle, a bounded share when busy."""
        self._check(extra)
        return run_blocking(self._perform(self._queue.fetch(batch_size)))

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Append these to the stream, all or none. What several threads dispatch at once travels together."""
        self._check_open()
        self._out.send(self._queue.entries(transactions))

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        """Acknowledge, delay, give back or bury, in one round trip."""
        run_blocking(self._perform(self._queue.settle(settlements)))

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Restart the idle time of these deliveries."""
        run_blocking(self._perform(self._queue.extend(transactions)))

    def counts(self) -> dict[str, int]:
        """How many messages are `ready`, `leased`, `delayed` and `dead` now, each up to ten thousand."""
        return run_blocking(self._perform(self._queue.counts()))

    def exhume(self, limit: int = 100) -> list[Exhumed]:
        """Dead letters, longest dead first, for a place that keeps all of them. They stay until `forget_dead`."""
        return run_blocking(self._perform(self._queue.exhume(limit)))

    def forget_dead(self, keys: Sequence[Any]) -> None:
        """These are kept elsewhere now."""
        run_blocking(self._perform(self._queue.forget_dead(keys)))

    def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """The dead letters, longest dead first."""
        return run_blocking(self._perform(self._queue.dead_letters(limit)))

    def close(self) -> None:
        """Close our connections; the given client's are untouched. Idempotent."""
        self._closed = True
        run_blocking(self._wire.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncRedisStreamsConnector(_Base):
    """The same for asyncio."""

    def __init__(self, redis: Any, stream: str, group: str = "onceward", **settings: Any) -> None:
        super().__init__(AsyncRedisWire(_client(redis, AsyncRedis)), stream, group, **settings)
        self._out = AsyncCoalescer(lambda entries: self._perform(self._queue.append(entries)))

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """As `RedisStreamsConnector.fetch_transactions`. Cancelled, it gives back what it took."""
        self._check(extra)
        fetching = asyncio.ensure_future(self._perform(self._queue.fetch(batch_size)))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            await self._give_back(fetching)
            raise

    async def _give_back(self, fetching: asyncio.Future[Any]) -> None:
        try:
            taken = await fetching
            await self._perform(
                self._queue.settle([Settlement(transaction, Verdict.RETURNED) for transaction in taken])
            )
        except Exception as error:  # noqa: BLE001  the caller wants to be cancelled, and is
            _log.warning("a cancelled fetch could not give back what it took; it comes again: %s", error)

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

    async def exhume_async(self, limit: int = 100) -> list[Exhumed]:
        """As `RedisStreamsConnector.exhume`."""
        return await self._perform(self._queue.exhume(limit))  # type: ignore[no-any-return]

    async def forget_dead_async(self, keys: Sequence[Any]) -> None:
        """As `RedisStreamsConnector.forget_dead`."""
        await self._perform(self._queue.forget_dead(keys))

    async def dead_letters_async(self, limit: int = 100) -> list[DeadLetter]:
        """As `RedisStreamsConnector.dead_letters`."""
        return await self._perform(self._queue.dead_letters(limit))  # type: ignore[no-any-return]

    async def close_async(self) -> None:
        """As `RedisStreamsConnector.close`."""
        self._closed = True
        await self._wire.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()


def _client(given: Any, kind: type[Any]) -> Any:
    """A client that knows where to connect: the given one, or one made from a URL. It never connects itself."""
    if isinstance(given, str):
        return kind.from_url(given)
    if not isinstance(given, kind):
        raise ConfigurationError(
            f"give a redis URL or a {kind.__module__.partition('.client')[0]}.{kind.__name__}, "
            f"not {type(given).__module__}.{type(given).__name__}"
        )
    return given
