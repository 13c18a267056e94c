"""The queue in a file, behind a wire. A watcher sees every delivery and its end, inside the queue's transaction."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from onceward.connectors import SqliteConnector
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.leased_deliveries import Held
from onceward.connectors.leases import AsyncLeasingConnector, AvailableRow, LeasingConnector
from onceward.connectors.sqlite.store import SqliteLeaseStore
from onceward.transaction import Settlement, Transaction
from tests.simulation.loop import Process
from tests.simulation.simulation import template_folder
from tests.simulation.sources.source import Source, Watcher
from tests.simulation.threads import block
from tests.simulation.wire import Wire

P = ParamSpec("P")
T = TypeVar("T")


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
                self._watcher.ended(self._process, *held, "done", transaction.id)
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


class BlockingQueue(LeasingConnector):
    """The same in a simulated thread."""

    def __init__(self, path: Path, process: Process, wire: Wire, watcher: Watcher, rules: LeaseRules) -> None:
        store = WatchedStore(path, process, watcher)
        process.last_wishes.append(store.close)
        super().__init__(store, rules, process.clock)
        self._process = process
        self._line = wire

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        return self._cross("fetch", lambda: super(BlockingQueue, self).fetch_transactions(batch_size))

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        self._cross("settle", lambda: super(BlockingQueue, self).settle_transactions(settlements))

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        self._cross("extend", lambda: super(BlockingQueue, self).extend_transactions(transactions))

    def _cross(self, what: str, action: Callable[[], T]) -> T:
        return block(self._line.call(self._process, "queue", what, action))


class FileSource(Source):
    name = "queue"
    has_unique_keys = False
    """SQLite numbers from 1 again once the table is empty; tokens tell deliveries apart."""

    def __init__(self, path: Path, wire: Wire, watcher: Watcher, rules: LeaseRules) -> None:
        self._path = path
        self._wire = wire
        self._watcher = watcher
        self._rules = rules
        self._view = sqlite3.connect(self._path, isolation_level=None)

    def open(self, process: Process) -> SimulatedQueue:
        return SimulatedQueue(self._path, process, self._wire, self._watcher, self._rules)

    def open_blocking(self, process: Process) -> BlockingQueue:
        return BlockingQueue(self._path, process, self._wire, self._watcher, self._rules)

    def left(self) -> list[Any]:
        return self._view.execute("SELECT seq, deliveries, lost FROM messages").fetchall()

    def totals(self) -> tuple[int, int, int]:
        counts = "SELECT appended, done, (SELECT count(*) FROM dead_letters) FROM tallies"
        appended, done, dead = self._view.execute(counts).fetchone()
        return appended, done, dead

    def buried(self) -> Counter[str]:
        return Counter(id_ for (id_,) in self._view.execute("SELECT transaction_id FROM dead_letters"))

    def close(self) -> None:
        self._view.close()


@cache
def empty_queue() -> Path:
    """An empty queue to copy: making it takes longer than most runs."""
    path = template_folder("queue") / "queue.db"
    SqliteConnector(path, synchronous="OFF").close()
    return path
