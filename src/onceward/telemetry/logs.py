"""Log fields: every record made under an engine says which task, step, attempt and transaction it belongs to.

`transaction_id`, `task`, `step`, `attempt`, `trace_id` and `span_id` are attributes of every `LogRecord`, empty
outside an engine, so that any formatter can name them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from opentelemetry import trace

from onceward.telemetry.context import current_work

FIELDS = ("transaction_id", "task", "step", "attempt", "trace_id", "span_id")

_make_record: Any = None


def install() -> None:
    """Add the fields to every record from now on, on top of whatever makes records now. Idempotent."""
    global _make_record
    if logging.getLogRecordFactory() is _stamped:
        return
    _make_record = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_stamped)


def _stamped(*arguments: Any, **more: Any) -> logging.LogRecord:
    record: logging.LogRecord = _make_record(*arguments, **more)
    work = current_work.get()
    if work is None:
        record.transaction_id = record.task = record.step = record.attempt = ""
    else:
        record.transaction_id = work.transaction_id or ""
        record.task = work.task
        record.step = work.step
        record.attempt = work.attempt
    span = trace.get_current_span().get_span_context()
    record.trace_id = trace.format_trace_id(span.trace_id) if span.is_valid else ""
    record.span_id = trace.format_span_id(span.span_id) if span.is_valid else ""
    return record


# Log lines: a JSON object each for machines, one plain line each for people. Never a payload.


Fields = Callable[[logging.LogRecord], Mapping[str, Any]]
"""What a line says beside its message."""


class JsonLines(logging.Formatter):
    """Time, level, logger, message, the fields that apply, and an exception's traceback."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII: no character of an id can break the line


class ConsoleLines(logging.Formatter):
    """The same for people."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f"  {name}={value}" for name, value in self._fields(record).items())
        line = f"{_moment(record)} {record.levelname:7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def log_to(stream: TextIO | None, form: str, fields: Fields) -> logging.Logger:
    """Make this the one handler of the root logger, which is returned; None is stderr. `form` is json or console."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter((JsonLines if form == "json" else ConsoleLines)(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.captureWarnings(True)
    return root


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


# Log lines of a run. Each says its worker's number, and what it is about: transaction, task, step, attempt, trace.


QUIET = ("asyncio", "aiosqlite")
"""Libraries that tell of every byte at the level of debugging."""


def start_logging(form: str, level: str, worker: int | None = None) -> None:
    """Log to stderr. What an app sets up for itself when it is imported comes later, and so wins."""
    install()

    def fields(record: logging.LogRecord) -> dict[str, Any]:
        told = {"worker": getattr(record, "worker", worker)} | {
            name: getattr(record, name, "") for name in FIELDS
        }
        return {name: value for name, value in told.items() if value not in (None, "")}

    root = log_to(None, form, fields)
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
