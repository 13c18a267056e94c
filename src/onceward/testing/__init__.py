"""For tests: a clock to move, telemetry to look at, and the conformance suites of onceward's seams."""

from typing import TYPE_CHECKING, Any

from onceward.testing.clock import FakeClock

if TYPE_CHECKING:
    from onceward.testing.telemetry import Recording, record

__all__ = ["FakeClock", "Recording", "record"]


def __getattr__(name: str) -> Any:
    # These need the OpenTelemetry SDK, which the rest of this package does not.
    if name in ("Recording", "record"):
        from onceward.testing import telemetry

        return getattr(telemetry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
