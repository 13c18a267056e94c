"""What the inbox counts of each event.

| name | kind | unit | attributes | |
|---|---|---|---|---|
| `onceward.inbox.events` | counter | {event} | consumer, event_type, outcome | attempts at events, by how they ended |
| `onceward.inbox.duplicates` | counter | {event} | consumer, event_type | skipped: done before |
| `onceward.inbox.duration` | histogram | s | consumer, outcome | from the attempt's begin to its commit |
| `onceward.inbox.retries` | histogram | {attempt} | consumer | attempts before the one that did it |

`outcome` is done, duplicate, superseded, busy, parked, failed, or contract. An event type that the contract does not
name counts as "other". A tracking id is never a metric attribute; it is in spans and logs.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, Final

from opentelemetry.metrics import MeterProvider

from onceward.inbox.attempts import Start
from onceward.inbox.contract import Contract
from onceward.inbox.errors import Busy, ContractError, Parked
from onceward.inbox.event import Event
from onceward.task.exceptions import Postponed
from onceward.telemetry import metrics
from onceward.telemetry.catalogue import METRICS, SCOPE
from onceward.telemetry.metrics import SECONDS
from onceward.telemetry.safety import SafeMeter, quietly

RETRIES: Final = (0, 1, 2, 3, 5, 10, 20, 50)
"""Bucket boundaries for counts of attempts."""

_instruments: weakref.WeakKeyDictionary[MeterProvider, InboxInstruments] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class InboxInstruments:
    """One set per meter provider."""

    def __init__(self, meter: SafeMeter) -> None:
        self.events = self._make(meter.create_counter, "onceward.inbox.events")
        self.duplicates = self._make(meter.create_counter, "onceward.inbox.duplicates")
        self.duration = self._make(
            meter.create_histogram, "onceward.inbox.duration", explicit_bucket_boundaries_advisory=SECONDS
        )
        self.retries = self._make(
            meter.create_histogram, "onceward.inbox.retries", explicit_bucket_boundaries_advisory=RETRIES
        )

    def _make(self, make: Any, name: str, **more: Any) -> Any:
        return make(name, METRICS[name].unit, METRICS[name].description, **more)

    def count(
        self, contract: Contract, event: Event, outcome: str, start: Start | None, began: float
    ) -> None:
        """Count an attempt that has just ended; `began` is by `time.perf_counter`."""
        consumer = {"consumer": contract.consumer_id}
        known = event.event_type in contract.event_types
        kind = {**consumer, "event_type": event.event_type if known else "other"}
        self.events.add(1, {**kind, "outcome": outcome})
        self.duration.record(time.perf_counter() - began, {**consumer, "outcome": outcome})
        if outcome == "duplicate":
            self.duplicates.add(1, kind)
        if outcome == "done" and start is not None:
            self.retries.record(start.token - 1, consumer)

    def count_failure(
        self, contract: Contract, event: Event, error: BaseException, start: Start | None, began: float
    ) -> None:
        outcomes = {Busy: "busy", Parked: "parked", Postponed: "postponed", ContractError: "contract"}
        kinds = (outcome for kind, outcome in outcomes.items() if isinstance(error, kind))
        self.count(contract, event, next(kinds, "failed"), start, began)


def instruments() -> InboxInstruments | None:
    """Return the instruments, or None without a meter provider. This is slow: call it once per engine call."""
    provider = metrics.meter_provider()
    found: InboxInstruments | None = None if provider is None else quietly(_instruments_of, provider)
    return found


def _instruments_of(provider: MeterProvider) -> InboxInstruments:
    with _lock:
        found = _instruments.get(provider)
        if found is None:
            found = _instruments[provider] = InboxInstruments(SafeMeter(provider, SCOPE))
        return found
