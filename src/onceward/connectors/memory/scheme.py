"""`memory://orders`: one queue per name in this process, so a producer's sink can be a consumer's source."""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Any

from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.leases import LeasingConnector
from onceward.connectors.memory.connector import AsyncMemoryConnector, MemoryLeaseStore
from onceward.connectors.reports import Durability, SourceCounts, SourceFacts, Survives
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme

if TYPE_CHECKING:
    from onceward.connectors.urls import Address

_stores: dict[str, MemoryLeaseStore] = {}
_lock = Lock()


class _Share:
    """A store that several connectors share: closing one leaves it open for the others."""

    def __init__(self, store: MemoryLeaseStore) -> None:
        self._store = store
        self._closed = False

    def transaction(self, wait: float) -> AbstractContextManager[object]:
        if self._closed:
            raise ConnectorClosedError("this memory connector is closed; create a new one to continue")
        return self._store.transaction(wait)

    def close(self) -> None:
        self._closed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Async(AsyncMemoryConnector):
    def __init__(self, wire: LeasingConnector) -> None:
        self._wire = wire
        self.lease = wire.lease


def check(address: Address) -> None:
    if not address.place:
        address.refuse("it has no name; write memory://orders")


def open_queue(address: Address, *, asynchronous: bool) -> Any:
    with _lock:
        store = _stores.setdefault(address.place, MemoryLeaseStore())
    wire = LeasingConnector(_Share(store), LeaseRules(**address.settings))
    return _Async(wire) if asynchronous else wire


def seconds_until_due(address: Address) -> float:
    """How long until a message that waits in the queue is available; infinite if none waits."""
    store = _stores.get(address.place)
    due = None if store is None else store.due()
    return inf if store is None or due is None else max(due - store.now(), 0.0)


def forget(address: Address) -> None:
    """Drop the queue and its messages."""
    with _lock:
        _stores.pop(address.place, None)


def facts(address: Address) -> SourceFacts:
    why = "memory:// is lost with the process, and every process has its own"
    advice = "use a durable source: sqlite:///orders.db, or redis://host/orders"
    return SourceFacts(durability=Durability(Survives.NOTHING, why, advice), redelivers=False)


def counts(address: Address) -> SourceCounts:
    why = "it exists only in the memory of the process that runs the consumer"
    return SourceCounts(notes={"appended": why})


SCHEME = Scheme(
    names=("memory",),
    keeps_order=True,
    settings=LEASE_SETTINGS,
    check=check,
    open=open_queue,
    facts=facts,
    counts=counts,
    in_process=True,
)
