"""What the inbox reports about each event: metrics, span attributes and a log line for every failure.

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

import logging
import threading
import time
import weakref
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.metrics import MeterProvider
from sqlalchemy.exc import StatementError

from onceward.inbox.attempts import Start
from onceward.inbox.contract import Contract
from onceward.inbox.errors import Busy, ContractError, Parked
from onceward.inbox.event import Event
from onceward.task.exceptions import Postponed
from onceward.task.lifecycle import text_of
from onceward.telemetry import metrics
from onceward.telemetry.catalogue import METRICS, SCOPE
from onceward.telemetry.context import current_work
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.metrics import SECONDS
from onceward.telemetry.safety import SafeMeter, quietly

_log = OwnLogger(logging.getLogger("onceward.inbox"))

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


class EventWatch:
    """Reports one attempt at one event."""

    __slots__ = ("_began", "_contract", "_event", "_instruments")

    def __init__(self, contract: Contract, event: Event, instruments: InboxInstruments | None) -> None:
        self._contract = contract
        self._event = event
        self._instruments = instruments
        self._began = time.perf_counter()
        quietly(self._name_event)

    def _name_event(self) -> None:
        span = trace.get_current_span()
        if span.is_recording():
            span.set_attributes(
                {
                    "consumer": self._contract.consumer_id,
                    "tracking_id": self._event.tracking_id,
                    "event_type": self._event.event_type,
                }
            )

    def record_end(self, outcome: str, start: Start | None) -> None:
        metrics = self._instruments
        if metrics is None:
            return
        consumer = {"consumer": self._contract.consumer_id}
        kind = {**consumer, "event_type": self._type()}
        metrics.events.add(1, {**kind, "outcome": outcome})
        metrics.duration.record(time.perf_counter() - self._began, {**consumer, "outcome": outcome})
        if outcome == "duplicate":
            metrics.duplicates.add(1, kind)
        if outcome == "done" and start is not None:
            metrics.retries.record(start.token - 1, consumer)

    def record_failure(self, error: BaseException, start: Start | None) -> None:
        """Count the failure, and log it with everything needed to find the event but nothing of its payload.

        Under an engine it is only logged as info: the engine reports each failure as a warning or an error.
        """
        if isinstance(error, Postponed):
            outcome = (
                "busy" if isinstance(error, Busy) else "parked" if isinstance(error, Parked) else "postponed"
            )
            self.record_end(outcome, start)
            return
        self.record_end("contract" if isinstance(error, ContractError) else "failed", start)
        hide_parameters(error)
        event = self._event
        where = {
            "consumer": self._contract.consumer_id,
            "tracking_id": event.tracking_id,
            "event_type": event.event_type,
            "aggregate_id": event.aggregate_id or "",
            "sequence": "" if event.sequence is None else event.sequence,
            "schema_version": event.schema_version,
            "lock_token": "" if start is None else start.token,
        }
        in_engine = current_work.get() is not None
        _log.log(
            logging.INFO if in_engine else logging.ERROR,
            "consumer %s: event %s of type %r (aggregate %s, start %s) failed: %s",
            self._contract.consumer_id,
            event.tracking_id,
            event.event_type,
            event.aggregate_id,
            "-" if start is None else start.token,
            text_of(error),
            exc_info=None if in_engine or isinstance(error, ContractError) else error,
            extra=where,
        )

    def _type(self) -> str:
        known = self._event.event_type in self._contract.event_types
        return self._event.event_type if known else "other"


def hide_parameters(error: BaseException | None) -> None:
    """Keep statement parameters, which usually contain the payload, out of the error's text: it is logged."""
    while error is not None:
        if isinstance(error, StatementError):
            error.hide_parameters = True
        error = error.__cause__


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
