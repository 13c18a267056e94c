"""For tests: a clock to move, telemetry to look at, and the conformance suites of onceward's seams."""

from onceward.testing.clock import FakeClock
from onceward.testing.telemetry import Recording, record

__all__ = ["FakeClock", "Recording", "record"]
