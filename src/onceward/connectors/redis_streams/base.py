"""What both connectors to a stream share: their settings, and how they send the commands of a `StreamQueue`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Unpack

from onceward._redis.wire import BlockingRedisWire
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward._sync import run_blocking
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.lease_rules import LeaseRules, LeaseSettings
from onceward.connectors.lines import KeyOf
from onceward.connectors.redis_streams.protocol import Exchange, StreamQueue
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

Batch = Sequence[Transaction]

_log = OwnLogger(logging.getLogger("onceward.connectors.redis_streams.connector"))


class StreamConnector:
    """Base of both connectors. See `LeaseRules` for the settings.

    With `maxlen`, every dispatch trims the stream to about that length; None leaves trimming to you. Entries
    that are trimmed before they are done become dead letters without a body.
    """

    def __init__(
        self,
        wire: BlockingRedisWire | AsyncRedisWire,
        stream: str,
        group: str = "onceward",
        *,
        maxlen: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        rules = LeaseRules(**settings)
        self.lease = rules.lease
        self._wire = wire
        self._queue = StreamQueue(wire.server, stream, group, rules, maxlen, clock)
        self._closed = False

    @property
    def owner(self) -> str | None:
        return self._queue.owner

    @owner.setter
    def owner(self, name: str) -> None:
        self._queue.owner = name

    def leave_poison_to_inbox(self) -> None:
        """See `InboxLeaseRules`. An inbox calls this."""
        self._queue.rules = self._queue.rules.beside_inbox()

    def keep_order(self, key_of: KeyOf, *, hold_dead: bool) -> None:
        """From now on, deliver only the first message of each key: see `onceward.connectors.lines`."""
        self._queue.keep_order(key_of, hold_dead=hold_dead)

    @property
    def in_lines(self) -> bool:
        """Whether it keeps order: then an outcome that is settled makes the next message of its key available."""
        return self._queue.in_lines

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosedError(
                f"the connector to {self._queue.stream} is closed; create a new one to continue"
            )

    def _check(self, extra: dict[str, Any]) -> None:
        if extra:
            raise TypeError(f"{type(self).__name__} has no fetch option {', '.join(map(repr, extra))}")

    async def _perform(
        self, exchange: Exchange, wire: BlockingRedisWire | AsyncRedisWire | None = None
    ) -> Any:
        self._check_open()
        wire = wire or self._wire
        replies: Any = None
        try:
            while True:
                replies = await wire.exchange(exchange.send(replies))
        except StopIteration as end:
            return end.value
        finally:
            if self._closed:  # closed while this used a connection
                await wire.close()

    def is_suspect(self, transaction: Transaction, /) -> bool:
        """See `onceward.connectors.base`."""
        return self._queue.is_suspect(transaction)

    def extend_from_thread(self, transactions: Batch, /) -> None:
        """See `AsyncConnector.extend_from_thread`. Connects again each time: this is needed rarely."""
        wire = self._wire.blocking()
        try:
            run_blocking(self._perform(self._queue.extend(self._queue.fetched_here(transactions)), wire))
        finally:
            run_blocking(wire.close())

    async def _fetch(self, size: int) -> Batch:
        taken: Batch = await self._perform(self._queue.fetch(size))
        return taken

    async def _await(self, seconds: float) -> bool:
        after, due = await self._perform(self._queue.next_due())
        if due <= 0:
            return True
        # XREAD takes nothing: a wait that ends in the middle leaves no delivery behind.
        milliseconds = max(int(min(seconds, due) * 1000), 1)
        command = ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", self._queue.stream, after)
        [reply] = await self._wire.exchange([command], milliseconds)
        if isinstance(reply, Exception):
            raise reply
        if reply:
            self._queue.note_arrival()
        return bool(reply) or due <= seconds

    async def _give_back(self, taken: Batch) -> None:
        await self._perform(
            self._queue.settle([Settlement(transaction, Verdict.RETURNED) for transaction in taken])
        )


def client_of(given: Any, kind: type[Any]) -> Any:
    """Return a client that knows where to connect: the given one, or one for a URL. It is never connected itself."""
    if isinstance(given, str):
        return kind.from_url(given)
    if not isinstance(given, kind):
        raise ConfigurationError(
            f"pass a redis URL or a {kind.__module__.partition('.client')[0]}.{kind.__name__}, "
            f"not {type(given).__module__}.{type(given).__name__}"
        )
    return given


def take(fetch: Coroutine[Any, Any, Batch], give_back: Callable[[Batch], Coroutine[Any, Any, None]]) -> Batch:
    """Run the fetch in a thread, where nothing cancels it."""
    return run_blocking(fetch)


async def take_async(
    fetch: Coroutine[Any, Any, Batch], give_back: Callable[[Batch], Coroutine[Any, Any, None]]
) -> Batch:
    """Run the fetch. If it is canceled, give back what it took."""
    fetching = asyncio.ensure_future(fetch)
    try:
        return await asyncio.shield(fetching)
    except asyncio.CancelledError:
        try:
            await give_back(await fetching)
        except Exception as error:  # noqa: BLE001  the caller gets its cancellation regardless
            _log.warning(
                "a canceled fetch could not give back its messages; they come back when their leases expire: %s",
                error,
            )
        raise
