"""A boundary as a source and a sink of the engine, in asyncio."""

# make faces writes connector.py, with
#   run_blocking: self._fetch, self._await, self._dispatch, self._settle, self._forget_dead
#   port: _call, _sleep

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.connectors.base import AsyncClosing
from onceward.connectors.boundary.base import FactConnector
from onceward.connectors.lease_rules import DeadMessage
from onceward.transaction import Settlement, Transaction


class AsyncBoundaryConnector(FactConnector[AsyncBoundaryClient], AsyncClosing):
    """An `AsyncConnector` to a boundary: `AsyncBoundaryConnector(AsyncBoundaryClient(url), "plant-a-receiver")`.

    To consume it needs the durable `consumer_name`, to produce `from_zone` and `to_zone`. Transactions carry facts:
    see `onceward.connectors.boundary.facts`. `max_deliveries` and `on_failure` say when a fact has failed permanently,
    which matters only under `AsyncWithDeadLetters`: otherwise it is redelivered forever. You close the client.

    Differences from a queue: two connectors with one name see the same facts; facts of a killed process are redelivered
    at once; delivery counts are lost with the process; an existing id is not appended a second time.
    """

    _needs = AsyncBoundaryClient

    async def _call(self, method: str, *arguments: Any, **more: Any) -> Any:
        return await getattr(self._client, method)(*arguments, **more)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Return at most `batch_size` facts: redeliveries first, then in the order of the log."""
        return await self._fetch(batch_size, extra)

    async def await_transactions_async(self, seconds: float, /) -> bool:
        """See `onceward.connectors.base`. The boundary answers when a fact is appended."""
        return await self._await(seconds)

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Append these, in this order and in few calls.

        Not atomic: after an error some may be appended, and repeating all of them is safe. A transaction that is not a
        fact is refused with `PayloadError` before anything is sent.
        """
        await self._dispatch(transactions)

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """End these deliveries, and confirm the offset up to which everything is done."""
        await self._settle(settlements)

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Keep these deliveries for another `lease`, from now."""
        self._extend(transactions)

    async def counts_async(self) -> dict[str, int]:
        """Count the fetched facts that are `ready`, `leased`, `delayed` and `dead` now."""
        return self._queue.counts()

    async def dead_letters_async(self, limit: int = 100) -> list[DeadMessage]:
        """Return facts that failed permanently and hold the cursor until another store has them."""
        return self._queue.dead_letters(limit)

    async def forget_dead_async(self, keys: Sequence[Any]) -> None:
        """Let the cursor pass these, by their `key`, once another store has them."""
        await self._forget_dead(keys)

    async def close_async(self) -> None:
        """Close the connector. Idempotent. What is not confirmed is redelivered to the next fetch under this name."""
        self._close()


class AsyncOwningBoundaryConnector(AsyncBoundaryConnector):
    """Owns its client, and closes it."""

    async def close_async(self) -> None:
        await super().close_async()
        await self._client.close()
