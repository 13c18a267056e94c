"""Records the spans and metrics of an engine, without touching the global providers of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from onceward.telemetry import metrics


class Recording:
    """The spans and metrics recorded so far."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self._reader])

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Finished spans in order of their start: all, or those with this name."""
        found = [span for span in self._exporter.get_finished_spans() if name in (None, span.name)]
        return sorted(found, key=lambda span: span.start_time or 0)

    def span(self, name: str) -> ReadableSpan:
        """The only span with this name."""
        (found,) = self.spans(name)
        return found

    def parent(self, span: ReadableSpan) -> str | None:
        """The name of a span's parent; None if the parent was not recorded."""
        by_id = {each.context.span_id: each.name for each in self.spans() if each.context is not None}
        return by_id.get(span.parent.span_id) if span.parent is not None else None

    def metric(self, name: str, **attributes: str) -> Any:
        """The value of a counter or gauge, or the count of a histogram; 0 if it was never recorded."""
        return sum(
            getattr(point, "value", None) or getattr(point, "count", 0)
            for point in self.points(name)
            if attributes.items() <= dict(point.attributes or {}).items()
        )

    def points(self, name: str) -> list[Any]:
        """The data points of a metric, one for each set of attributes."""
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@contextmanager
def record() -> Iterator[Recording]:
    """Record telemetry: `with record() as recording: task.consume_transactions()`, then inspect `recording`."""
    recording = Recording()
    with metrics.override(recording.tracer_provider, recording.meter_provider):
        yield recording
    recording.tracer_provider.shutdown()
    recording.meter_provider.shutdown()
