"""Tools for tests: apps in memory, a fake clock, recorded telemetry, real servers, and conformance suites for
connectors and stores."""

from typing import TYPE_CHECKING, Any

from onceward.testing.clock import FakeClock

if TYPE_CHECKING:
    from onceward.testing.telemetry import Recording, record
    from onceward.testing.under_test import AppUnderTest, AsyncAppUnderTest, Published, RecordedEffect, app

__all__ = [
    "AppUnderTest",
    "AsyncAppUnderTest",
    "FakeClock",
    "Published",
    "RecordedEffect",
    "Recording",
    "app",
    "record",
]


def __getattr__(name: str) -> Any:
    # Imported lazily: only these need the OpenTelemetry SDK.
    if name in ("Recording", "record"):
        from onceward.testing import telemetry

        return getattr(telemetry, name)
    if name in ("AppUnderTest", "AsyncAppUnderTest", "RecordedEffect", "Published", "app"):
        from onceward.testing import under_test

        return getattr(under_test, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
