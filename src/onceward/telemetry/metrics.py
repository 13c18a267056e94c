"""The metrics of the catalogue, as instruments."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

from onceward.telemetry.catalogue import METRICS, SCOPE

SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Bucket boundaries for durations; the SDK's own are made for milliseconds."""

_made: weakref.WeakKeyDictionary[MeterProvider, Instruments] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Instruments:
    """One set per meter provider."""

    def __init__(self, meter: Meter) -> None:
        self.processed = self._counter(meter, "onceward.transactions.processed")
        self.succeeded = self._counter(meter, "onceward.transactions.succeeded")
        self.failed = self._counter(meter, "onceward.transactions.failed")
        self.abandoned = self._counter(meter, "onceward.transactions.abandoned")
        self.timeouts = self._counter(meter, "onceward.attempts.timeouts")
        self.retries = self._counter(meter, "onceward.attempts.retries")
        self.backoff = self._counter(meter, "onceward.attempts.backoff")
        self.fetches = self._counter(meter, "onceward.fetches")
        self.empty_fetches = self._counter(meter, "onceward.fetches.empty")
        name = "onceward.step.duration"
        self.duration = meter.create_histogram(
            name, METRICS[name].unit, METRICS[name].description, explicit_bucket_boundaries_advisory=SECONDS
        )
        name = "onceward.slots.stuck"
        self.stuck = meter.create_up_down_counter(name, METRICS[name].unit, METRICS[name].description)
        name = "onceward.slots.in_use"
        meter.create_observable_gauge(name, [self._in_use], METRICS[name].unit, METRICS[name].description)
        self.slots_in_use: dict[int, tuple[str, Callable[[], int]]] = {}
        """Asked when metrics are collected, so that being in flight costs nothing."""

    def _counter(self, meter: Meter, name: str) -> Any:
        return meter.create_counter(name, METRICS[name].unit, METRICS[name].description)

    def _in_use(self, _: CallbackOptions) -> Iterable[Observation]:
        by_task: dict[str, int] = {}
        for task, count in list(self.slots_in_use.values()):
            by_task[task] = by_task.get(task, 0) + count()
        return [Observation(count, {"task": task}) for task, count in by_task.items()]


def instruments(provider: MeterProvider) -> Instruments:
    with _lock:
        made = _made.get(provider)
        if made is None:
            made = _made[provider] = Instruments(provider.get_meter(SCOPE))
        return made
