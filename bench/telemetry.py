"""The engine with the SDK and a batch processor, against the same hand-written spans and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from bench import work
from bench.measure import Line, compare, ratio
from onceward import Transaction
from onceward.telemetry import metrics

STEP: dict[str, Any] = {
    "task": "NoOp",
    "step": "process",
    "max_attempts": 1,
    "backoff": 0.0,
    "backoff_multiplier": 2.0,
    "backoff_cap": 0.0,
}


class NoSpans(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class NoMetrics(MetricExporter):
    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        return None


def lines() -> Iterator[Line]:
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(NoSpans()))
    meters = MeterProvider([PeriodicExportingMetricReader(NoMetrics(), export_interval_millis=60_000)])
    by_hand = ByHand(tracers.get_tracer("by hand"), meters)
    with metrics.override(tracers, meters):
        given = work.policy()
        yield ratio(
            "threads, SDK with batch processor",
            compare(work.COUNT, by_hand.loop, work.threads(given)),
            at_most=1.3,
        )
        yield ratio(
            "asyncio, SDK with batch processor",
            compare(work.COUNT, lambda: asyncio.run(by_hand.loop_async()), work.tasks(given)),
            at_most=1.3,
        )
    tracers.shutdown()
    meters.shutdown()


class ByHand:
    """A bare loop with hand-written telemetry equal to the engine's."""

    def __init__(self, tracer: Tracer, meters: MeterProvider) -> None:
        meter = meters.get_meter("by hand")
        self.tracer = tracer
        self.processed = meter.create_counter("processed")
        self.succeeded = meter.create_counter("succeeded")
        self.in_use = meter.create_up_down_counter("in_use")
        self.duration = meter.create_histogram("duration")

    def loop(self) -> None:
        with self.tracer.start_as_current_span("consume_transactions"):
            for batch in work.batches():
                with self.tracer.start_as_current_span("fetch_transactions", attributes=STEP):
                    pass
                for transaction in batch:
                    self.one(transaction)

    def one(self, transaction: Transaction) -> None:
        attributes: dict[str, Any] = {"task": "NoOp", "transaction_id": transaction.id}
        self.in_use.add(1, {"task": "NoOp"})
        with self.tracer.start_as_current_span("start_processing", attributes=attributes) as span:
            began = time.perf_counter()
            attributes = {**STEP, "transaction_id": transaction.id, "attempt": 0}
            with self.tracer.start_as_current_span("process", attributes=attributes):
                work.handle(transaction)
            self.duration.record(time.perf_counter() - began, {"task": "NoOp", "step": "process"})
            began = time.perf_counter()
            attributes = {**STEP, "step": "success", "transaction_id": transaction.id, "attempt": 0}
            with self.tracer.start_as_current_span("handle_success", attributes=attributes):
                pass
            self.duration.record(time.perf_counter() - began, {"task": "NoOp", "step": "success"})
            span.set_attribute("outcome", "succeeded")
        self.processed.add(1, {"task": "NoOp"})
        self.succeeded.add(1, {"task": "NoOp"})
        self.in_use.add(-1, {"task": "NoOp"})

    async def loop_async(self) -> None:
        # No-op handlers never wait, so bare asyncio would run the same loop.
        self.loop()
