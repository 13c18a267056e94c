"""The `AsyncConnector` contract, over a `LeasingConnector`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from onceward.connectors.leasing import LeasingConnector
from onceward.connectors.rules import DeadLetter, Exhumed, LeaseRules
from onceward.transaction import Settlement, Transaction

P = ParamSpec("P")
T = TypeVar("T")


class AsyncLeasingConnector:
    """Every method is the one of the sync connector. Subclasses say only how a call is made: `_call`."""

    def __init__(self, wire: LeasingConnector) -> None:
        self._wire = wire
        self.lease = wire.lease

    @property
    def rules(self) -> LeaseRules:
        return self._wire.rules

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it to its end, or not at all, without blocking the event loop for long."""
        raise NotImplementedError

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """As `LeasingConnector.fetch_transactions`."""
        return await self._call(self._wire.fetch_transactions, batch_size, **extra)

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `LeasingConnector.dispatch_transactions`."""
        await self._call(self._wire.dispatch_transactions, transactions)

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """As `LeasingConnector.settle_transactions`."""
        await self._call(self._wire.settle_transactions, settlements)

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `LeasingConnector.extend_transactions`."""
        await self._call(self._wire.extend_transactions, transactions)

    async def counts_async(self) -> dict[str, int]:
        """As `LeasingConnector.counts`."""
        return await self._call(self._wire.counts)

    async def dead_letters_async(self, limit: int = 100) -> list[DeadLetter]:
        """As `LeasingConnector.dead_letters`."""
        return await self._call(self._wire.dead_letters, limit)

    async def exhume_async(self, limit: int = 100) -> list[Exhumed]:
        """As `LeasingConnector.exhume`."""
        return await self._call(self._wire.exhume, limit)

    async def forget_dead_async(self, keys: Sequence[Any]) -> None:
        """As `LeasingConnector.forget_dead`."""
        await self._call(self._wire.forget_dead, keys)

    async def close_async(self) -> None:
        """As `LeasingConnector.close`."""
        await self._call(self._wire.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()
