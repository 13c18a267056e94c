"""What the inbox counts of each event.

| name | kind | unit | attributes | |
|---|---|---|---|---|
| `onceward.inbox.events` | counter | {event} | consumer, event_type, outcome | attempts at events, by how they ended |
| `onceward.inbox.duplicates` | counter | {event} | consumer, event_type | skipped: done before |
| `onceward.inbox.duration` | histogram | s | consumer, outcome | from the attempt's begin to its commit |
| `onceward.inbox.retries` | histogram | {attempt} | consumer | attempts before the one that did it |

`outcome` is done, duplicate, superseded, busy, parked, postponed, failed, or contract. An event type that the contract
does not name counts as "other". A tracking id is never a metric attribute; it is in spans and logs.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, Final

from opentelemetry.metrics import MeterProvider

from onceward.inbox.contract import Contract
from onceward.inbox.errors import Busy, ContractError, Parked
from onceward.inbox.event import Event
from onceward.inbox.stores.types import Key
from onceward.task.exceptions import Postponed
from onceward.telemetry import metrics
from onceward.telemetry.catalogue import METRICS, SCOPE
from onceward.telemetry.metrics import SECONDS
from onceward.telemetry.safety import SafeMeter, quietly
from onceward.telemetry.tallies import RETRIES, AttemptTally, tally_of

REMEMBERED: Final = 10_000
"""Events that have failed and are not done yet, at most."""

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
        self, contract: Contract, event: Event, outcome: str, seconds: float, retries: int | None
    ) -> None:
        consumer = {"consumer": contract.consumer_id}
        known = event.event_type in contract.event_types
        kind = {**consumer, "event_type": event.event_type if known else "other"}
        self.events.add(1, {**kind, "outcome": outcome})
        self.duration.record(seconds, {**consumer, "outcome": outcome})
        if outcome == "duplicate":
            self.duplicates.add(1, kind)
        if retries is not None:
            self.retries.record(retries, consumer)


class InboxMetrics:
    """Everything that counts the attempts of one consumer."""

    def __init__(self, instruments: InboxInstruments | None, tally: AttemptTally | None) -> None:
        self.instruments = instruments
        self.tally = tally

    def count(
        self, contract: Contract, event: Event, outcome: str, retries: int | None, began: float
    ) -> None:
        """Count an attempt that has just ended; `began` is by `time.perf_counter`, `retries` those before it."""
        seconds = time.perf_counter() - began
        retries = retries if outcome == "done" else None
        if self.instruments is not None:
            self.instruments.count(contract, event, outcome, seconds, retries)
        if self.tally is not None:
            self.tally.count(outcome, seconds, retries)

    def count_failure(self, contract: Contract, event: Event, error: BaseException, began: float) -> None:
        self.count(contract, event, _outcome_of(error), None, began)


def _outcome_of(error: BaseException) -> str:
    outcomes = {Busy: "busy", Parked: "parked", Postponed: "postponed", ContractError: "contract"}
    return next((outcome for kind, outcome in outcomes.items() if isinstance(error, kind)), "failed")


class SeenFailures:
    """Counts failed attempts of events whose starts the inbox does not record, as long as this process remembers."""

    def __init__(self) -> None:
        self._of: dict[Key, int] = {}

    def note(self, key: Key) -> None:
        self._of[key] = self._of.pop(key, 0) + 1
        if len(self._of) > REMEMBERED:
            self._of.pop(next(iter(self._of)), None)

    def forget(self, key: Key) -> int:
        """Return how many there were."""
        return self._of.pop(key, 0)


def metrics_of(consumer_id: str) -> InboxMetrics | None:
    """Return what counts a consumer's attempts; None if nothing does. This is slow: call it once per engine call."""
    found, tally = instruments(), tally_of(consumer_id)
    return None if found is None and tally is None else InboxMetrics(found, tally)


def instruments() -> InboxInstruments | None:
    """Return the instruments, or None without a meter provider."""
    provider = metrics.meter_provider()
    found: InboxInstruments | None = None if provider is None else quietly(_instruments_of, provider)
    return found


def _instruments_of(provider: MeterProvider) -> InboxInstruments:
    with _lock:
        found = _instruments.get(provider)
        if found is None:
            found = _instruments[provider] = InboxInstruments(SafeMeter(provider, SCOPE))
        return found
