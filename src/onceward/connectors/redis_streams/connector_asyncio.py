"""The connector to a Redis stream for asyncio."""

# make faces writes connector.py, with
#   run_blocking: self._perform, self._wire, self._await
#   text: "If it is canceled, it gives back what it took." → ""
#   text: "several tasks" → "several threads"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis as AsyncRedis

from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward.connectors.base import AsyncClosing
from onceward.connectors.batches import AsyncCoalescer
from onceward.connectors.lease_rules import DeadMessage
from onceward.connectors.lines import LineBehind
from onceward.connectors.redis_streams.base import StreamConnector, client_of, take_async
from onceward.connectors.redis_streams.protocol import Entry
from onceward.transaction import Settlement, Transaction


class AsyncRedisStreamsConnector(StreamConnector, AsyncClosing):
    """`AsyncRedisStreamsConnector("redis://localhost", "orders")`: the `AsyncConnector` contract on a stream."""

    def __init__(self, redis: Any, stream: str, group: str = "onceward", **settings: Any) -> None:
        super().__init__(AsyncRedisWire(client_of(redis, AsyncRedis)), stream, group, **settings)
        self._out = AsyncCoalescer[Entry](lambda entries: self._perform(self._queue.append(entries)))

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take new entries, and those of dead consumers: at once when idle, a bounded share when busy.

        If it is canceled, it gives back what it took.
        """
        self._check(extra)
        return await take_async(self._fetch(batch_size), self._give_back)

    async def await_transactions_async(self, seconds: float, /) -> bool:
        """Wait until the stream has an entry that the group was not given, or a lease or delay is over."""
        return await self._await(seconds)

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Append these to the stream, all or none. What several tasks dispatch at once is sent together."""
        self._check_open()
        await self._out.send(self._queue.entries(transactions))

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """Acknowledge, delay, give back or bury, in one round trip."""
        await self._perform(self._queue.settle(settlements))

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Restart the idle time of these deliveries."""
        await self._perform(self._queue.extend(transactions))

    async def hasten_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Make those of these available now that were given back for later."""
        await self._perform(self._queue.hasten(transactions))

    async def release_owner_async(self, owner: str) -> int:
        """Free the entries of a dead owner now; they count as lost. Return how many there were."""
        released: int = await self._perform(self._queue.release_owner(owner))
        return released

    async def counts_async(self) -> dict[str, int]:
        """Count the messages that are `ready`, `leased`, `delayed` and `dead` now, each up to ten thousand."""
        found: dict[str, int] = await self._perform(self._queue.counts())
        return found

    async def forget_dead_async(self, keys: Sequence[Any]) -> None:
        """Remove dead letters by their `key`, once another store has them."""
        await self._perform(self._queue.forget_dead(keys))

    async def acknowledge_dead_async(self, keys: Sequence[Any]) -> None:
        """Remove dead letters by their `key`, because another copy of each is done. They count as done, too."""
        await self._perform(self._queue.acknowledge_dead(keys))

    async def dead_letters_async(self, limit: int = 100) -> list[DeadMessage]:
        """Return dead letters, longest dead first. They stay until `forget_dead`."""
        found: list[DeadMessage] = await self._perform(self._queue.dead_letters(limit))
        return found

    async def lines_behind_async(self, keys: Sequence[str], limit: int) -> dict[str, LineBehind]:
        """What waits behind the first messages of these keys, with at most `limit` of their ids."""
        found: dict[str, LineBehind] = await self._perform(self._queue.lines_behind(keys, limit))
        return found

    async def close_async(self) -> None:
        """Close our own connections, not those of the given client. Idempotent."""
        self._closed = True
        await self._wire.close()
