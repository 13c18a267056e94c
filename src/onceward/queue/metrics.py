"""The queue's metrics, counted at each round trip. Nothing is counted without a meter provider.

| name | kind | unit | attributes | |
|---|---|---|---|---|
| `onceward.queue.enqueued` | counter | {message} | stream, group | added to the stream |
| `onceward.queue.read` | counter | {message} | stream, group | delivered as new |
| `onceward.queue.acked` | counter | {message} | stream, group | acknowledged |
| `onceward.queue.claimed` | counter | {message} | stream, group | taken over from another delivery |
| `onceward.queue.undecodable` | counter | {entry} | stream, group | delivered and left pending unread |
| `onceward.queue.failures` | counter | {call} | stream, group, operation | ended in a QueueError of Redis |
| `onceward.queue.duration` | histogram | s | stream, group, operation | a read's includes its wait |

`operation` is enqueue, read, ack, claim or pending, which lists pending entries for a claim.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from opentelemetry.metrics import MeterProvider

from onceward.queue.config import QueueConfig
from onceward.telemetry import metrics
from onceward.telemetry.catalogue import SCOPE
from onceward.telemetry.metrics import SECONDS
from onceward.telemetry.safety import SafeMeter, quietly

_by_provider: weakref.WeakKeyDictionary[MeterProvider, QueueInstruments] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class QueueMetrics:
    def __init__(self, config: QueueConfig) -> None:
        self._where = {"stream": config.stream_key, "group": config.consumer_group}

    def begin(self) -> Count | None:
        """Start counting a round trip. Return None without a meter provider."""
        provider = metrics.meter_provider()
        found = None if provider is None else quietly(_instruments, provider)
        return None if found is None else Count(found, self._where)


class Count:
    """The counts of one round trip."""

    __slots__ = ("_began", "_instruments", "_where", "arrivals")

    def __init__(self, instruments: QueueInstruments, where: dict[str, str]) -> None:
        self._instruments = instruments
        self._where = where
        self._began = time.perf_counter()
        self.arrivals: list[float] = []
        """When each reply arrived."""

    def add(self, operation: str, messages: int, undecodable: int = 0) -> None:
        if messages:
            self._instruments.messages[operation].add(messages, self._where)
        if undecodable:
            self._instruments.undecodable.add(undecodable, self._where)

    def add_failure(self, operation: str) -> None:
        self._instruments.failures.add(1, self._where | {"operation": operation})

    def record_duration(self, operation: str, reply: int) -> None:
        """Record how long it took: from the reply before its own to its own."""
        if reply < len(self.arrivals):  # a read that was stopped has none
            began = self.arrivals[reply - 1] if reply else self._began
            self._instruments.duration.record(
                self.arrivals[reply] - began, self._where | {"operation": operation}
            )


class QueueInstruments:
    """One set per meter provider."""

    def __init__(self, meter: SafeMeter) -> None:
        self.messages: dict[str, Any] = {
            "enqueue": meter.create_counter("onceward.queue.enqueued", "{message}", "added to the stream"),
            "read": meter.create_counter("onceward.queue.read", "{message}", "delivered as new"),
            "ack": meter.create_counter("onceward.queue.acked", "{message}", "acknowledged"),
            "claim": meter.create_counter("onceward.queue.claimed", "{message}", "taken over"),
        }
        self.undecodable = meter.create_counter(
            "onceward.queue.undecodable", "{entry}", "left pending unread"
        )
        self.failures = meter.create_counter("onceward.queue.failures", "{call}", "ended in a QueueError")
        self.duration = meter.create_histogram(
            "onceward.queue.duration", "s", "how long calls took", explicit_bucket_boundaries_advisory=SECONDS
        )


def _instruments(provider: MeterProvider) -> QueueInstruments:
    with _lock:
        found = _by_provider.get(provider)
        if found is None:
            found = _by_provider[provider] = QueueInstruments(SafeMeter(provider, SCOPE))
        return found
