"""Record what an engine tells OpenTelemetry, without touching the process's global providers."""

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
    """Spans and metrics, so far."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self._reader])

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Finished spans in order of their start, all of them or those of one name."""
        found = [span for span in self._exporter.get_finished_spans() if name in (None, span.name)]
        return sorted(found, key=lambda span: span.start_time or 0)

    def span(self, name: str) -> ReadableSpan:
        """The only span of that name."""
        (found,) = self.spans(name)
        return found

    def parent(self, span: ReadableSpan) -> str | None:
        """The name of a span's parent, if it was recorded."""
        by_id = {each.context.span_id: each.name for each in self.spans() if each.context is not None}
        return by_id.get(span.parent.span_id) if span.parent is not None else None

    def metric(self, name: str, **attributes: str) -> Any:
        """The value of a counter or gauge, or the count of a histogram; 0 if it never was recorded."""
        data = self._reader.get_metrics_data()
        total: Any = 0
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points if metric.name == name else ():
                        if attributes.items() <= dict(point.attributes or {}).items():
                            total += getattr(point, "value", None) or getattr(point, "count", 0)
        return total


@contextmanager
def record() -> Iterator[Recording]:
    """`with record() as recording: task.consume_transactions()`, then look at `recording`."""
    recording = Recording()
    with metrics.override(recording.tracer_provider, recording.meter_provider):
        yield recording
    recording.tracer_provider.shutdown()
    recording.meter_provider.shutdown()
