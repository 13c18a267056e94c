"""Spans, metrics and log fields. Telemetry observes; it never makes decisions."""

from onceward.telemetry.logs import JsonLines, LogFields
from onceward.telemetry.setup import Telemetry, setup

__all__ = ["JsonLines", "LogFields", "Telemetry", "setup"]
