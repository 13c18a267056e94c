"""What onceward tells the outside: spans, metrics and log fields. It watches, and decides nothing."""

from onceward.telemetry.setup import Telemetry, setup

__all__ = ["Telemetry", "setup"]
