"""The parts of an inbox, in threads and in asyncio."""

from __future__ import annotations

from collections.abc import Callable

from onceward.inbox.evidence.file import NO_FILE, EvidenceSettings
from onceward.inbox.evidence.gate import EvidenceGate
from onceward.inbox.middleware import InboxMiddleware
from onceward.inbox.ports import InboxPorts
from onceward.inbox.processor import EventProcessor, HandlerOutbox
from onceward.inbox.purge.purge import Purge
from onceward.inbox.registry import Registry
from onceward.inbox.stores import store_of
from onceward.storage import migrations


class InboxParts:
    """The coroutines behind an inbox, over its ports."""

    def __init__(self, ports: InboxPorts, clock: Callable[[], float] | None, env: str | None) -> None:
        self.asynchronous = ports.asynchronous
        self._store = store_of(ports.dialect, clock)
        self.processor = EventProcessor(self._store, ports)
        """Runs the attempts, and has the inbox's store and leases; for test kits, not for applications."""
        self._registry = Registry(self._store, ports, EvidenceGate.from_environment(self._store, env))
        self._purge = Purge(self._store, ports, self._registry)

    def middleware(self) -> InboxMiddleware:
        """Return the middleware that the engine wraps around a task with a contract."""
        return InboxMiddleware(self.processor, self._registry)

    @property
    def gate(self) -> EvidenceGate:
        """What admits consumers in production."""
        return self._registry.gate

    def set_gate(self, *, production: bool, evidence: EvidenceSettings = NO_FILE) -> None:
        """Replace what the environment says; for apps, which have settings of their own, and for test kits."""
        self._registry.gate = EvidenceGate(self._store, production, evidence)

    def set_outbox(self, outbox: HandlerOutbox) -> None:
        """Let handlers publish: `inbox.set_outbox(app.outbox)`. The inbox must be in the database of that app."""
        self.processor.outbox = outbox

    def migrations_sql(self) -> str:
        """Return the migrations of this database as SQL to read or to run by hand."""
        return migrations.as_script(self._store.name)
