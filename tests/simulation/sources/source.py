"""What a source of messages is to the world of consumers, and what that world is to it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable
from typing import Any, Protocol

from onceward.connectors.lease_rules import LeaseRules
from tests.simulation.loop import Process
from tests.simulation.wire import Wire


class Watcher(Protocol):
    """Sees every delivery and its end, at the moment when the source makes it true."""

    kind: bool
    """Whether a lease can only end because its owner is dead."""
    ends: dict[Hashable, str]
    """How messages ended: `done` or `buried`."""
    holders: dict[Hashable, tuple[Any, Process]]
    """The newest delivery of each message that is in flight, and who has it."""

    def delivered(self, process: Process, key: Hashable, token: Any) -> None: ...

    def ended(self, process: Process, key: Hashable, token: Any, how: str, id_: str | None) -> None:
        """A delivery changed its message: `done`, `returned`, `delayed` or `buried`."""
        ...

    def accuse(self, problem: str) -> None: ...


class Source(ABC):
    name: str
    """As processes are cut off from it."""
    has_unique_keys = True
    """Whether the key of a message is never that of another."""

    @abstractmethod
    def open(self, process: Process) -> Any:
        """Return a connector for this process."""

    def open_blocking(self, process: Process) -> Any:
        """Return a connector for a simulated thread."""
        raise NotImplementedError

    @abstractmethod
    def left(self) -> list[Any]:
        """What has not ended."""

    @abstractmethod
    def totals(self) -> tuple[int, int, int]:
        """How many messages were ever appended, are done, and are dead."""

    @abstractmethod
    def buried(self) -> Counter[str]:
        """The ids of dead letters."""

    def lost(self) -> set[str]:
        """The ids of messages that the server has lost, by its own settings."""
        return set()

    async def fail(self) -> None:
        """Let the server have its own trouble, until this is canceled."""
        return

    def calm_down(self) -> None:
        """Nothing goes wrong from here on."""
        return

    def close(self) -> None:
        """Close what is open outside of the processes."""
        return


class RestartingSource(Source):
    """A server that may crash and come back: with all that it knew, or without its last second."""

    def __init__(self, wire: Wire, watcher: Watcher, rules: LeaseRules, root: Process) -> None:
        random = wire.random
        self.wire = wire
        self.root = root
        self.late = random.choice((0.0, 0.0, 0.01, 0.05))
        """How often a request arrives after its sender has given up."""
        self._restarts = random.choice((0.0, 0.0, 4.0, 12.0))
        """Seconds between two restarts of the server, on average; 0 is never."""
        self._forgets = bool(self._restarts) and random.random() < 0.5
        self._watcher = watcher
        self._rules = rules
        self.is_down = False
        watcher.kind = watcher.kind and not (self.late or self._restarts)

    @abstractmethod
    def sync(self) -> None:
        """Remember what is on disk now."""

    @abstractmethod
    def crash(self) -> None:
        """Break all connections."""

    @abstractmethod
    def come_back(self) -> None:
        """Serve again; if it `_forgets`, with what was on disk."""

    async def fail(self) -> None:
        if not self._restarts:
            return
        random, loop = self.wire.random, self.wire.loop
        restarts_at = random.expovariate(1 / self._restarts)
        while True:
            await asyncio.sleep(1.0)
            if loop.time() >= restarts_at:
                await asyncio.sleep(random.random() * 0.9)
                self._crash()
                await asyncio.sleep(random.choice((0.2, 3.0)))
                self._come_back()
                restarts_at = loop.time() + random.expovariate(1 / self._restarts)
            if self._forgets:
                self.sync()

    def _crash(self) -> None:
        self.wire.history.note(self.name, "crashes")
        self.is_down = True
        self.crash()

    def _come_back(self) -> None:
        self.is_down = False
        self.wire.history.note(self.name, "is back%s", " without its last second" if self._forgets else "")
        self.come_back()

    def calm_down(self) -> None:
        self.late = 0.0
        if self.is_down:
            self._come_back()
