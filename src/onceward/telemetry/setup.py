"""Set up the OpenTelemetry SDK from the standard `OTEL_*` variables. Opens only what they ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onceward.telemetry.safety import quietly
from onceward.telemetry.span_file import FILE_VARIABLE

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace.export import SpanExporter

FILE_DELAY_MS = 500
"""How long spans are batched before they go to the file. Short, because people watch it."""


class Telemetry:
    """The exporters that `setup` started."""

    def __init__(self, stops: list[Callable[[], Any]]) -> None:
        self._stops = stops

    def shutdown(self) -> None:
        """Export what is pending, and stop. Idempotent."""
        while self._stops:
            quietly(self._stops.pop())


def setup() -> Telemetry:
    """Install the SDK's tracer and meter providers. Call it once, when the process starts.

    Honors `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER` (`otlp`, `console`, `none`), `OTEL_METRICS_EXPORTER` (`otlp`,
    `console`, `prometheus`, `none`), and everything the SDK and its exporters read: `OTEL_SERVICE_NAME`,
    `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_…`, …
    A Prometheus port (`OTEL_EXPORTER_PROMETHEUS_HOST`, `…_PORT`) is opened only if that exporter is chosen.

    `ONCEWARD_TRACE_FILE=path` writes spans to that file, for `onceward trace`; other exporters then default to `none`.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Telemetry([])
    try:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(
            "telemetry.setup() needs the OpenTelemetry SDK: pip install 'onceward[otel]'"
        ) from error
    stops: list[Callable[[], Any]] = []
    processors = []
    span_exporter = _span_exporter(_choice("OTEL_TRACES_EXPORTER"))
    if span_exporter is not None:
        processors.append(BatchSpanProcessor(span_exporter))
    if trace_file := os.environ.get(FILE_VARIABLE):
        from onceward.telemetry.span_exporter import SpanFileExporter

        exporter = SpanFileExporter(trace_file)
        processors.append(BatchSpanProcessor(exporter, schedule_delay_millis=FILE_DELAY_MS))
    if processors:
        tracers = TracerProvider()
        for processor in processors:
            tracers.add_span_processor(processor)
        trace.set_tracer_provider(tracers)
        stops.append(tracers.shutdown)
    reader = _metric_reader(_choice("OTEL_METRICS_EXPORTER"))
    if reader is not None:
        meters = MeterProvider([reader])
        metrics.set_meter_provider(meters)
        stops.append(meters.shutdown)
    return Telemetry(stops)


def _choice(variable: str) -> str:
    default = "none" if os.environ.get(FILE_VARIABLE) else "otlp"
    return os.environ.get(variable, "").strip().lower() or default


def _span_exporter(choice: str) -> SpanExporter | None:
    if choice == "none":
        return None
    if choice == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if choice == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    raise ValueError(f"OTEL_TRACES_EXPORTER={choice} is not supported; use otlp, console or none")


def _metric_reader(choice: str) -> MetricReader | None:
    if choice == "none":
        return None
    if choice == "prometheus":
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import start_http_server

        start_http_server(
            port=int(os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "9464")),
            addr=os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "localhost"),
        )
        return PrometheusMetricReader()
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader

    if choice == "console":
        return PeriodicExportingMetricReader(ConsoleMetricExporter())
    if choice == "otlp":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return PeriodicExportingMetricReader(OTLPMetricExporter())
    raise ValueError(
        f"OTEL_METRICS_EXPORTER={choice} is not supported; use otlp, console, prometheus or none"
    )
