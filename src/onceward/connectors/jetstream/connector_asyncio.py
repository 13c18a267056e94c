"""The connector to a JetStream stream for asyncio."""

# make faces writes connector.py, with
#   run_blocking: self._wire
#   text: "If it is canceled, it gives back what it took." → ""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onceward._nats.wire import AsyncNatsWire
from onceward.connectors.base import AsyncClosing
from onceward.connectors.codec import encode_all
from onceward.connectors.jetstream.base import JetStreamBase
from onceward.connectors.jetstream.line import Pull
from onceward.connectors.lease_rules import DeadMessage
from onceward.transaction import Settlement, Transaction


class AsyncJetStreamConnector(JetStreamBase, AsyncClosing):
    """`AsyncJetStreamConnector("nats://localhost:4222", "ORDERS")`: the `AsyncConnector` contract on a stream."""

    def __init__(self, url: str, stream: str, consumer: str = "onceward", **settings: Any) -> None:
        super().__init__(AsyncNatsWire(), url, stream, consumer, **settings)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take messages whose lease has expired or whose delay is over, then new ones.

        If it is canceled, it gives back what it took.
        """
        self._queue.check_open()
        self._check(batch_size, extra)
        pull = Pull()
        return await self._wire.run(self._queue.fetch(batch_size, pull), pull.end, self._give_back)

    async def await_transactions_async(self, seconds: float, /) -> bool:
        """See `onceward.connectors.base`. What comes is kept for the next fetch; closing gives it back."""
        self._queue.check_open()
        pull = Pull()
        return await self._wire.run(
            self._queue.wait_for_messages(seconds, pull), pull.end, self._return_ready
        )

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Publish these, all or none: several as one atomic batch, of at most 1,000."""
        self._queue.check_open()
        bodies = encode_all(transactions)
        if bodies:
            await self._wire.run(self._queue.dispatch(bodies))

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """Acknowledge, delay, give back or bury. Returns when JetStream has confirmed every one."""
        self._queue.check_open()
        await self._wire.run(self._queue.settle(settlements))

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Restart the ack wait of these deliveries."""
        self._queue.check_open()
        await self._wire.run(self._queue.extend(transactions))

    async def release_owner_async(self, owner: str) -> int:
        """Have JetStream deliver again what a dead owner held; it counts as lost. Return how many there were."""
        return await self._wire.run(self._queue.release_owner(owner))

    async def counts_async(self) -> dict[str, int]:
        """Count the messages that are `ready`, `leased` (or delayed: JetStream counts both as one) and `dead` now."""
        return await self._wire.run(self._queue.counts())

    async def forget_dead_async(self, keys: Sequence[Any]) -> None:
        """Remove dead letters by their `key`, once another store has them."""
        await self._wire.run(self._queue.forget_dead(keys))

    async def acknowledge_dead_async(self, keys: Sequence[Any]) -> None:
        """Remove dead letters by their `key`, because another copy of each is done. They count as done, too."""
        await self._wire.run(self._queue.acknowledge_dead(keys))

    async def dead_letters_async(self, limit: int = 100) -> list[DeadMessage]:
        """Return dead letters, longest dead first. They stay until `forget_dead`."""
        return await self._wire.run(self._queue.dead_letters(limit))

    async def close_async(self) -> None:
        """Close the connection. Idempotent."""
        await self._wire.run(self._queue.close())
