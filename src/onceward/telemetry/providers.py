"""Who listens: the tracer and meter providers in force, or None where there is only the OpenTelemetry API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import metrics, trace

_overridden: tuple[trace.TracerProvider | None, metrics.MeterProvider | None] | None = None


def tracer_provider() -> trace.TracerProvider | None:
    if _overridden is not None:
        return _overridden[0]
    provider = trace.get_tracer_provider()
    return None if _is_api_only(provider, "opentelemetry.trace") else provider


def meter_provider() -> metrics.MeterProvider | None:
    if _overridden is not None:
        return _overridden[1]
    provider = metrics.get_meter_provider()
    return None if _is_api_only(provider, "opentelemetry.metrics") else provider


def _is_api_only(provider: object, api: str) -> bool:
    # The API's own providers are proxies and no-ops; an SDK's class lives elsewhere.
    module = type(provider).__module__
    return module == api or module.startswith(api + ".")


@contextmanager
def override(
    tracer: trace.TracerProvider | None = None, meter: metrics.MeterProvider | None = None
) -> Iterator[None]:
    """Use these instead of the global providers, which can be set only once in a process. For tests."""
    global _overridden
    before, _overridden = _overridden, (tracer, meter)
    try:
        yield
    finally:
        _overridden = before
