"""Spans, metrics and log fields. Telemetry observes; it never makes decisions."""

from onceward.telemetry.setup import Telemetry, setup

__all__ = ["Telemetry", "setup"]
