"""The parts that an inbox is made of, in threads and in asyncio."""

from __future__ import annotations

from collections.abc import Callable

from onceward.inbox.middleware import InboxMiddleware
from onceward.inbox.ports import InboxPorts
from onceward.inbox.processor import EventProcessor
from onceward.inbox.purge.purge import Purge
from onceward.inbox.registry import Registry
from onceward.inbox.stores import store_of
from onceward.storage import migrations


class InboxParts:
    """The coroutines behind an inbox, over its ports."""

    def __init__(self, ports: InboxPorts, clock: Callable[[], float], env: str | None) -> None:
        self.asynchronous = ports.asynchronous
        self._store = store_of(ports.dialect, clock)
        self._core = EventProcessor(self._store, ports)
        self._registry = Registry(self._store, ports, env)
        self._purge = Purge(self._store, ports, self._registry)

    def middleware(self) -> InboxMiddleware:
        """What the engine puts around a task with a contract."""
        return InboxMiddleware(self._core, self._registry)

    def migrations_sql(self) -> str:
        """The migrations of this database, as SQL to read or to run by hand."""
        return migrations.as_script(self._store.name)
