"""Tools for tests: a fake clock, recorded telemetry, real servers, and conformance suites for connectors and stores."""

from typing import TYPE_CHECKING, Any

from onceward.testing.clock import FakeClock

if TYPE_CHECKING:
    from onceward.testing.telemetry import Recording, record

__all__ = ["FakeClock", "Recording", "record"]


def __getattr__(name: str) -> Any:
    # Imported lazily: only these need the OpenTelemetry SDK.
    if name in ("Recording", "record"):
        from onceward.testing import telemetry

        return getattr(telemetry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
