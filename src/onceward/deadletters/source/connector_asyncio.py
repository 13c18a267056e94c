"""A source with a store of dead letters, for asyncio."""

# make faces writes connector.py, with
#   run_blocking: self.fetch, self.settle, self.extend, self._port

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from onceward.deadletters.dead_letters_asyncio import AsyncDeadLetters
from onceward.deadletters.source.base import LetterSource
from onceward.deadletters.source.ports import AsyncSourcePort
from onceward.errors import ConfigurationError
from onceward.transaction import Settlement, Transaction


class AsyncWithDeadLetters(LetterSource):
    """An `AsyncConnector` around an `AsyncConnector`, with a store of dead letters.

    `AsyncWithDeadLetters(source, AsyncDeadLetters(engine), consumer="billing")`: `consumer` is the contract's
    consumer_id, or any name by which the letters shall be found; `origin` says in words where they came from. With None
    for a source it delivers redriven letters only, for use beside a loop of your own. A redriven letter that fails once
    is dead again: the retries of its task have been spent by then.
    """

    def __init__(
        self, source: Any, dead_letters: AsyncDeadLetters, *, consumer: str, origin: str | None = None
    ) -> None:
        if not isinstance(dead_letters, AsyncDeadLetters):
            raise ConfigurationError(
                f"AsyncWithDeadLetters needs AsyncDeadLetters, not {type(dead_letters).__name__}; DeadLetters go with "
                "WithDeadLetters"
            )
        self._port = AsyncSourcePort(source)
        super().__init__(self._port, dead_letters.operations, consumer, origin)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Redriven letters that are due, or else what the source has."""
        return await self.fetch(batch_size, **extra)

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Passed on to the source."""
        await self._port.ask("dispatch_transactions", transactions)

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """Each to the source or the store it came from. What the source buries goes to the store."""
        await self.settle(settlements)

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """Keep these leased, by the source or the store they came from."""
        await self.extend(transactions)

    async def close_async(self) -> None:
        """Close the source as well."""
        self._closed = True
        await self._port.ask("close")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()
