"""What holds consumers at one moment; and the records of it in one process, for an app without a database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from onceward._time import wall

Identity = tuple[str, str]
"""A consumer: the id in its contract, or its name if it has none; and its name."""


class Down(msgspec.Struct, kw_only=True):
    """An outage."""

    since: float
    reason: str
    probes: int = 0
    """How many have failed."""
    due_in: float = 0.0
    """Seconds until the next probe, when this was read."""
    token: int = 0
    probing: bool = False
    """Whether a probe is under way."""


class Paused(msgspec.Struct, kw_only=True):
    """A consumer that an operator has paused."""

    consumer_id: str
    name: str
    paused_at: float
    operator: str
    reason: str

    @property
    def identity(self) -> Identity:
        return self.consumer_id, self.name


class FleetState(msgspec.Struct):
    """All that holds the consumers of a database now."""

    down: Mapping[str, Down] = {}
    """Outages by their subject."""
    paused: Mapping[Identity, Paused] = {}


class HoldRecords(Protocol):
    """Where outages are noted: see `onceward.failures.records`."""

    async def read(self) -> FleetState: ...
    async def introduce(self, consumer: Identity) -> None: ...
    async def declare(self, subject: str, reason: str, probe_in: float) -> bool: ...
    async def take_probes(self, intervals: Mapping[str, float], lease: float) -> dict[str, int] | None: ...
    async def keep_probe(self, subject: str, token: int, lease: float) -> bool: ...
    async def release_probe(self, subject: str, token: int) -> None: ...
    async def fail_probe(self, subject: str, token: int, reason: str | None, probe_in: float) -> None: ...
    async def end(self, subject: str, token: int) -> bool: ...


class ProcessRecords:
    """The records of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._down: dict[str, Down] = {}
        self._next: dict[str, float] = {}
        self._held: dict[str, float] = {}

    async def read(self) -> FleetState:
        with self._lock:
            now = self._clock()
            return FleetState(
                {
                    subject: msgspec.structs.replace(
                        down, due_in=self._next[subject] - now, probing=self._held.get(subject, 0.0) > now
                    )
                    for subject, down in self._down.items()
                }
            )

    async def introduce(self, consumer: Identity) -> None:
        """No command could ask for it."""

    async def declare(self, subject: str, reason: str, probe_in: float) -> bool:
        with self._lock:
            if subject in self._down:
                return False
            self._down[subject] = Down(since=wall(), reason=reason)
            self._next[subject] = self._clock() + probe_in
            return True

    async def take_probes(self, intervals: Mapping[str, float], lease: float) -> dict[str, int] | None:
        with self._lock:
            now = self._clock()
            for subject in intervals:
                if (
                    subject not in self._down
                    or self._next[subject] > now
                    or self._held.get(subject, now) > now
                ):
                    return None
            for subject, interval in intervals.items():
                self._down[subject].token += 1
                self._held[subject], self._next[subject] = now + lease, now + interval
            return {subject: self._down[subject].token for subject in intervals}

    async def keep_probe(self, subject: str, token: int, lease: float) -> bool:
        with self._lock:
            if not self._is_current(subject, token):
                return False
            self._held[subject] = self._clock() + lease
            return True

    async def release_probe(self, subject: str, token: int) -> None:
        with self._lock:
            if self._is_current(subject, token):
                self._held.pop(subject, None)

    async def fail_probe(self, subject: str, token: int, reason: str | None, probe_in: float) -> None:
        with self._lock:
            if self._is_current(subject, token):
                down = self._down[subject]
                down.probes += 1
                down.reason = reason or down.reason
                self._held.pop(subject, None)
                self._next[subject] = self._clock() + probe_in

    async def end(self, subject: str, token: int) -> bool:
        with self._lock:
            if not self._is_current(subject, token):
                return False
            del self._down[subject], self._next[subject]
            self._held.pop(subject, None)
            return True

    def _is_current(self, subject: str, token: int) -> bool:
        down = self._down.get(subject)
        return down is not None and down.token == token
