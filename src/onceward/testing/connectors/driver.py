"""Drives sync and async connectors through the same blocking calls, so each test is written once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Thread
from typing import Any, Self

from onceward.task.exceptions import TransactionException
from onceward.transaction import Settlement, Transaction, Verdict


class ConnectorDriver:
    """A connector of either kind with blocking methods. An async one runs on its own event loop.

    Any thread may call it. As a context manager, it closes the connector at the end.
    """

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self._loop = None if hasattr(connector, "fetch_transactions") else asyncio.new_event_loop()
        if self._loop is not None:
            self._thread = Thread(target=self._loop.run_forever, name="connector-driver")
            self._thread.start()

    def fetch(self, batch_size: int = 100, **extra: Any) -> list[Transaction]:
        return list(self._call("fetch_transactions", batch_size, **extra))

    def dispatch(self, *transactions: Transaction) -> None:
        self._call("dispatch_transactions", transactions)

    def settle(self, settlements: Sequence[Settlement]) -> None:
        self._call("settle_transactions", settlements)

    def done(self, *transactions: Transaction) -> None:
        self.settle([Settlement(transaction, Verdict.DONE) for transaction in transactions])

    def give_back(self, *transactions: Transaction) -> None:
        self.settle([Settlement(transaction, Verdict.RETURNED) for transaction in transactions])

    def fail(self, *transactions: Transaction, error: TransactionException | None = None) -> None:
        self.settle([Settlement(transaction, Verdict.FAILED, error) for transaction in transactions])

    def extend(self, *transactions: Transaction) -> None:
        self._call("extend_transactions", transactions)

    def close(self) -> None:
        self._call("close")

    def call(self, name: str, *args: Any) -> Any:
        """Call a method that is not part of the contract; an async connector has it with the suffix `_async`."""
        return self._call(name, *args)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._loop is None:
            return getattr(self.connector, name)(*args, **kwargs)
        coroutine = getattr(self.connector, f"{name}_async")(*args, **kwargs)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
