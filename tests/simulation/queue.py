"""The queue in a file, behind a wire. A watcher sees every delivery and its end, inside the queue's transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.leases import AsyncLeasingConnector, AvailableRow, Held, LeasingConnector
from onceward.connectors.sqlite.store import SqliteLeaseStore
from onceward.transaction import Transaction
from tests.simulation.loop import Process
from tests.simulation.wire import Wire

P = ParamSpec("P")
T = TypeVar("T")


class Watcher(Protocol):
    def delivered(self, process: Process, key: int, token: int) -> None: ...

    def ended(self, process: Process, key: int, token: int, how: str, transaction: Any) -> None:
        """A delivery changed its message: `done`, `returned`, `delayed` or `buried`."""
        ...


class WatchedStore(SqliteLeaseStore):
    def __init__(self, path: Path, process: Process, watcher: Watcher) -> None:
        super().__init__(path, "OFF")
        self._process = process
        self._watcher = watcher

    def lease(self, rows: Sequence[AvailableRow], token: int, until: float) -> None:
        super().lease(rows, token, until)
        for row in rows:
            self._watcher.delivered(self._process, row[0], token)

    def remove(self, deliveries: Sequence[Held], transactions: Sequence[Transaction]) -> Sequence[Held]:
        missed = super().remove(deliveries, transactions)
        for held, transaction in zip(deliveries, transactions, strict=True):
            if held not in missed:
                self._watcher.ended(self._process, *held, "done", transaction)
        return missed

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        return self._tell(super().give_back(key, token, visible_at), key, token, "returned")

    def delay(self, key: int, token: int, *more: Any) -> bool:  # type: ignore[override]
        return self._tell(super().delay(key, token, *more), key, token, "delayed")

    def bury(self, key: int, token: int | None, *more: Any) -> bool:  # type: ignore[override]
        buried = super().bury(key, token, *more)
        return self._tell(buried, key, token, "buried") if token is not None else buried

    def _tell(self, changed: bool, key: int, token: int, how: str) -> bool:
        if changed:
            self._watcher.ended(self._process, key, token, how, None)
        return changed


class SimulatedQueue(AsyncLeasingConnector):
    extend_from_thread = None  # type: ignore[assignment]  # there are no threads

    def __init__(self, path: Path, process: Process, wire: Wire, watcher: Watcher, rules: LeaseRules) -> None:
        store = WatchedStore(path, process, watcher)
        process.last_wishes.append(store.close)
        super().__init__(LeasingConnector(store, rules, process.clock))
        self._process = process
        self._line = wire

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        what = getattr(function, "__name__", "call").removesuffix("_transactions")
        return await self._line.call(self._process, "queue", what, lambda: function(*args, **kwargs))
