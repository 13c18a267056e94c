"""The engine's instruments, and the tracer and meter providers in use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from onceward.telemetry.catalogue import METRICS, SCOPE
from onceward.telemetry.safety import SafeMeter, quietly

SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Bucket boundaries for durations; the SDK's defaults are for milliseconds."""
NOTICED = 0.25
"""Seconds until a telemetry that was off is found to be on: asking the API costs a fifth of sending a message."""

_instruments: weakref.WeakKeyDictionary[MeterProvider, EngineInstruments] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_override: tuple[trace.TracerProvider | None, metrics.MeterProvider | None] | None = None


class EngineInstruments:
    """The engine's instruments, one set per meter provider."""

    def __init__(self, meter: SafeMeter) -> None:
        self.processed = self._counter(meter, "onceward.transactions.processed")
        self.succeeded = self._counter(meter, "onceward.transactions.succeeded")
        self.failed = self._counter(meter, "onceward.transactions.failed")
        self.abandoned = self._counter(meter, "onceward.transactions.abandoned")
        self.timeouts = self._counter(meter, "onceward.attempts.timeouts")
        self.retries = self._counter(meter, "onceward.attempts.retries")
        self.backoff = self._counter(meter, "onceward.attempts.backoff")
        self.fetches = self._counter(meter, "onceward.fetches")
        self.empty_fetches = self._counter(meter, "onceward.fetches.empty")
        self.duration = self._durations(meter, "onceward.step.duration")
        self.process_duration = self._durations(meter, "messaging.process.duration")
        self.operation_duration = self._durations(meter, "messaging.client.operation.duration")
        self.sent = self._counter(meter, "messaging.client.sent.messages")
        self.consumed = self._counter(meter, "messaging.client.consumed.messages")
        name = "onceward.slots.stuck"
        self.stuck = meter.create_up_down_counter(name, METRICS[name].unit, METRICS[name].description)
        name = "onceward.slots.in_use"
        meter.create_observable_gauge(name, [self._in_use], METRICS[name].unit, METRICS[name].description)
        self.slots_in_use: dict[int, tuple[str, Callable[[], int]]] = {}
        """Called only when metrics are collected, so a transaction in flight costs nothing."""

    def _counter(self, meter: SafeMeter, name: str) -> Any:
        return meter.create_counter(name, METRICS[name].unit, METRICS[name].description)

    def _durations(self, meter: SafeMeter, name: str) -> Any:
        return meter.create_histogram(
            name, METRICS[name].unit, METRICS[name].description, explicit_bucket_boundaries_advisory=SECONDS
        )

    def _in_use(self, _: CallbackOptions) -> Iterable[Observation]:
        by_task: dict[str, int] = {}
        for task, count in list(self.slots_in_use.values()):
            by_task[task] = by_task.get(task, 0) + count()
        return [Observation(count, {"task": task}) for task, count in by_task.items()]


def instruments(provider: MeterProvider) -> EngineInstruments:
    """The instruments of this provider, created on first use."""
    with _lock:
        found = _instruments.get(provider)
        if found is None:
            found = _instruments[provider] = EngineInstruments(SafeMeter(provider, SCOPE))
        return found


def tracer_provider() -> trace.TracerProvider | None:
    """The tracer provider in use; None if no OpenTelemetry SDK is set up."""
    if _override is not None:
        return _override[0]
    provider: trace.TracerProvider | None = quietly(trace.get_tracer_provider)
    return None if provider is None or _is_api_only(provider, "opentelemetry.trace") else provider


def meter_provider() -> metrics.MeterProvider | None:
    """The meter provider in use; None if no OpenTelemetry SDK is set up."""
    if _override is not None:
        return _override[1]
    provider: MeterProvider | None = quietly(metrics.get_meter_provider)
    return None if provider is None or _is_api_only(provider, "opentelemetry.metrics") else provider


_off_until = 0.0


def is_on() -> bool:
    """Whether an OpenTelemetry SDK is set up. One that is set up later is noticed within `NOTICED`."""
    global _off_until
    if _override is not None:
        return _override[0] is not None or _override[1] is not None
    now = monotonic()
    if now < _off_until:
        return False
    found = tracer_provider() is not None or meter_provider() is not None
    _off_until = 0.0 if found else now + NOTICED
    return found


def _is_api_only(provider: object, api: str) -> bool:
    # The API's own providers are proxies and no-ops; those of an SDK are defined elsewhere.
    module = type(provider).__module__
    return module == api or module.startswith(api + ".")


@contextmanager
def override(
    tracer: trace.TracerProvider | None = None, meter: metrics.MeterProvider | None = None
) -> Iterator[None]:
    """Use these instead of the global providers, which can be set only once per process. For tests."""
    global _override
    before, _override = _override, (tracer, meter)
    try:
        yield
    finally:
        _override = before
