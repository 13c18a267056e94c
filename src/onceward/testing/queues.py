"""The queues of an app under test: memory in place of every source and sink."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from onceward.connectors.memory.scheme import forget, seconds_until_due
from onceward.connectors.scheme import LEASE_SETTINGS
from onceward.connectors.urls import Address
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.app.app import Onceward

_numbers = count(1)


class Published(msgspec.Struct, frozen=True):
    """A message that a handler, a producer or a schedule has published."""

    target: str
    """The name of the consumer that gets it, or the URL of a sink that no consumer of the app reads."""
    payload: Any
    id: str
    metadata: dict[str, Any]


class Queues:
    """Memory for each source of an app. A message for a place goes to every consumer that reads there."""

    def __init__(self, app: Onceward) -> None:
        self._app = app
        self._number = next(_numbers)
        self._detour = app.detour
        self.published: list[Published] = []
        self._sources = {name: consumer.source for name, consumer in app.consumers.items()}
        self._sinks = {name: producer.sink for name, producer in app.producers.items()}
        self._memory = {name: self._queue(name, source) for name, source in self._sources.items()}

    def _queue(self, name: str, source: Address) -> Address:
        settings = {each: value for each, value in source.settings.items() if each in LEASE_SETTINGS}
        return Address(f"memory://test-{self._number}/{name}?{urlencode(settings)}")

    def install(self) -> None:
        app = self._app
        for name, consumer in app.consumers.items():
            consumer.source = self._memory[name]
            consumer.forget_sender()
        for name, producer in app.producers.items():
            producer.sink = self.route(self._sinks[name])
            producer.forget_sender()
        app.detour = self.route

    def remove(self) -> None:
        app = self._app
        for name, consumer in app.consumers.items():
            consumer.source = self._sources[name]
            consumer.forget_sender()
        for name, producer in app.producers.items():
            producer.sink = self._sinks[name]
            producer.forget_sender()
        app.detour = self._detour
        for each in self._memory.values():
            forget(each)

    def route(self, sink: Address) -> Address:
        """Where messages for this address go instead."""
        found = {
            name: memory
            for name, memory in self._memory.items()
            if sink.url == memory.url or _place(sink) == _place(self._sources[name])
        }
        return Route(f"memory://test-{self._number}/route-{next(_numbers)}", found, str(sink), self.published)

    def seconds_until_due(self, *names: str) -> float:
        """How long until a message for one of these consumers is due, or for any."""
        queues = [self._memory[name] for name in names or self._memory]
        return min(map(seconds_until_due, queues), default=inf)


def _place(address: Address) -> tuple[str, ...]:
    return address.scheme, address.place, str(address.settings.get("queue", ""))


class Route(Address):
    """A sink that records what it gets, and puts it into the queues of the consumers that would get it."""

    def __init__(
        self, url: str, consumers: dict[str, Address], target: str, published: list[Published]
    ) -> None:
        super().__init__(url, sink=True)
        self._consumers = consumers
        self._target = target
        self._published = published

    def open(self, *, asynchronous: bool) -> Any:
        queues = {name: each.open(asynchronous=False) for name, each in self._consumers.items()}
        sink = RouteSink(queues, self._target, self._published)
        return AsyncRouteSink(sink) if asynchronous else sink


class RouteSink:
    """Its connector."""

    def __init__(self, queues: dict[str, Any], target: str, published: list[Published]) -> None:
        self._queues = queues
        self._target = target
        self._published = published

    def dispatch_transactions(self, transactions: Sequence[Transaction], /, **_: Any) -> None:
        for each in transactions:
            for name in self._queues or [self._target]:
                self._published.append(Published(name, each.payload, each.id, dict(each.metadata)))
        for queue in self._queues.values():
            queue.dispatch_transactions(transactions)

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()


class AsyncRouteSink:
    """`RouteSink` for asyncio: memory takes no time."""

    def __init__(self, sink: RouteSink) -> None:
        self._sink = sink

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /, **_: Any) -> None:
        self._sink.dispatch_transactions(transactions)

    async def close_async(self) -> None:
        self._sink.close()
