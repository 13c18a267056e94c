"""What a source of messages is to the world of consumers, and what that world is to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable
from typing import Any, Protocol

from tests.simulation.loop import Process


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
