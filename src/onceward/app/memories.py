"""`memory://name`: one queue for each name of this process, so that a producer's sink is a consumer's source."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.leasing import LeasingConnector
from onceward.connectors.memory import AsyncMemoryConnector, MemoryStore
from onceward.connectors.rules import LeaseRules

_stores: dict[str, MemoryStore] = {}
_lock = Lock()


class _Share:
    """A store of many connectors: closed for the one that was closed, and open for the others."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._closed = False

    def transaction(self, wait: float) -> AbstractContextManager[object]:
        if self._closed:
            raise ConnectorClosedError("this memory connector is closed; make a new one to go on")
        return self._store.transaction(wait)

    def close(self) -> None:
        self._closed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Async(AsyncMemoryConnector):
    def __init__(self, wire: LeasingConnector) -> None:
        self._wire = wire
        self.lease = wire.lease


def open_memory(name: str, settings: dict[str, Any], *, asynchronous: bool) -> Any:
    with _lock:
        store = _stores.setdefault(name, MemoryStore())
    wire = LeasingConnector(_Share(store), LeaseRules(**settings), time.time)
    return _Async(wire) if asynchronous else wire
