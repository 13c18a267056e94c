"""A source with a store of dead letters, for asyncio."""

# make faces writes connector.py, with
#   run_blocking: self.fetch, self.settle, self.extend, self._port

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from onceward.deadletters.dead_letters_asyncio import AsyncDeadLetters
from onceward.deadletters.source.base import AsyncSourcePort, LetterSource
from onceward.errors import ConfigurationError
from onceward.transaction import Settlement, Transaction


class AsyncWithDeadLetters(LetterSource):
    """An `AsyncConnector` around an `AsyncConnector`, with a store of dead letters.

    `AsyncWithDeadLetters(source, AsyncDeadLetters(engine), consumer="billing")`: `consumer` is the contract's
    consumer_id, or any name to find the letters by; `origin` says where they came from, for people. If `source` is
    None it delivers only redriven letters, for use next to your own loop. A redriven letter that fails once is dead
    again: its task has already used up its retries by then.
    """

    def __init__(
        self, source: Any, dead_letters: AsyncDeadLetters, *, consumer: str, origin: str | None = None
    ) -> None:
        if not isinstance(dead_letters, AsyncDeadLetters):
            raise ConfigurationError(
                f"AsyncWithDeadLetters needs AsyncDeadLetters, not {type(dead_letters).__name__}; for DeadLetters use "
                "WithDeadLetters"
            )
        self._port = AsyncSourcePort(source)
        super().__init__(self._port, dead_letters.operations, consumer, origin)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take redriven letters that are due, otherwise messages of the source."""
        return await self.fetch(batch_size, **extra)

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Send these to the source."""
        await self._port.ask("dispatch_transactions", transactions)

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """Settle each with the source or store it came from. Messages that the source buries move to the store."""
        await self.settle(settlements)

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Extend the leases of these with the source or store they came from."""
        await self.extend(transactions)

    async def close_async(self) -> None:
        """Close the source, too."""
        self._closed = True
        await self._port.ask("close")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()
