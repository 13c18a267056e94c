"""Logging and telemetry that misbehave. Neither may change what happens to a message."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from onceward.testing.telemetry import record


class RaisingFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise RuntimeError("this filter is broken")


class LockedHandler(logging.StreamHandler[io.StringIO]):
    """Slow inside the handler's lock."""

    def emit(self, record: logging.LogRecord) -> None:
        time.sleep(0.0005)
        super().emit(record)


class Saboteur(SpanProcessor):
    def __init__(self, rng: Random, moment: str) -> None:
        self._rng = rng
        self._moment = moment

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        self._strike("start")

    def on_end(self, span: ReadableSpan) -> None:
        self._strike("end")

    def _strike(self, moment: str) -> None:
        if self._moment == "slow":
            time.sleep(0.001)
        elif self._moment == moment and self._rng.random() < 0.3:
            raise RuntimeError(f"this span processor fails at the {moment}")


def install_logging(rng: Random, *, handlers_may_raise: bool) -> str:
    """Set up the process's logging in one of many ways, and return which."""
    kinds = ["quiet", "basic", "factory", "locked", *(["filter"] if handlers_may_raise else [])]
    kind = rng.choice(kinds)
    root = logging.getLogger()
    handler: logging.Handler = (
        LockedHandler(io.StringIO()) if kind == "locked" else logging.StreamHandler(io.StringIO())
    )
    root.addHandler(logging.NullHandler() if kind == "quiet" else handler)
    root.setLevel(logging.INFO)
    if kind == "filter":
        logging.getLogger("onceward.engine").addFilter(RaisingFilter())
    if kind == "factory":
        before = logging.getLogRecordFactory()

        def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
            made = before(*args, **kwargs)
            made.custom = 1
            return made

        logging.setLogRecordFactory(factory)
    return kind


@contextmanager
def telemetry(rng: Random) -> Iterator[str]:
    """Record spans with a processor that misbehaves, or record nothing."""
    kind = rng.choice(("off", "off", "good", "slow", "start", "end"))
    if kind == "off":
        yield kind
        return
    with record() as recording:
        if kind != "good":
            recording.tracer_provider.add_span_processor(Saboteur(rng, kind))
        yield kind
