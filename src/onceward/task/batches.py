"""The caller's iterable, a batch at a time."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from itertools import islice
from typing import Any

from onceward.transaction import Transaction


class _Input:
    """Holds no more than it hands out. When the iterable raises, what it gave before is handed out first; the
    error comes with the next call."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self.held: list[Transaction] = []
        """What a call took that was cut off before it could hand it out."""

    def _begin(self) -> list[Transaction]:
        if self._error is not None:
            raise self._error
        self.held = []
        return self.held

    def _end(self) -> list[Transaction]:
        taken, self.held = self.held, []
        return taken

    def _stumble(self, error: Exception) -> None:
        if not self.held:
            raise error
        self._error = error


class Batches(_Input):
    """Takes the next so many."""

    def __init__(self, transactions: Iterable[Transaction]) -> None:
        super().__init__()
        self._iterator = iter(transactions)

    def __call__(self, size: int) -> list[Transaction]:
        taken = self._begin()
        try:
            for item in islice(self._iterator, size):
                taken.append(_checked(item))
        except Exception as error:  # noqa: BLE001
            self._stumble(error)
        return self._end()


class AsyncBatches(_Input):
    """Takes the next so many, in asyncio, of either kind of iterable."""

    def __init__(self, transactions: Iterable[Transaction] | AsyncIterable[Transaction]) -> None:
        super().__init__()
        self._iterator = aiter(
            transactions if isinstance(transactions, AsyncIterable) else _each(transactions)
        )

    async def __call__(self, size: int) -> list[Transaction]:
        taken = self._begin()
        try:
            while len(taken) < size:
                taken.append(_checked(await anext(self._iterator)))
        except StopAsyncIteration:
            pass
        except Exception as error:  # noqa: BLE001
            self._stumble(error)
        return self._end()


async def _each(transactions: Iterable[Transaction]) -> AsyncIterator[Transaction]:
    for transaction in transactions:
        yield transaction


def _checked(item: Any) -> Transaction:
    if not isinstance(item, Transaction):
        raise TypeError(f"expected a Transaction, got {type(item).__name__}; wrap it: Transaction(payload=…)")
    return item
