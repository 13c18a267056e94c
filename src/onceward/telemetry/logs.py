"""Log fields and log lines.

`transaction_id`, `task`, `step`, `attempt`, `trace_id` and `span_id` are attributes of every `LogRecord`, empty
outside an engine, so any formatter can use them. Lines are JSON objects for machines or plain text for people, and
never contain a payload.
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

QUIET = ("asyncio", "aiosqlite")
"""Libraries that log every byte at debug level."""

Fields = Callable[[logging.LogRecord], Mapping[str, Any]]
"""Returns the fields that a line shows next to its message."""

_wrapped_factory: Any = None


def install() -> None:
    """Add the fields to every new record, on top of the current record factory. Idempotent."""
    global _wrapped_factory
    if logging.getLogRecordFactory() is _make_record:
        return
    _wrapped_factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_make_record)


def _make_record(*arguments: Any, **more: Any) -> logging.LogRecord:
    record: logging.LogRecord = _wrapped_factory(*arguments, **more)
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


class JsonLines(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message, its fields, and the traceback if it has one."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII only: no character of an id can break the line


class ConsoleLines(logging.Formatter):
    """Formats a record as plain text for people."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f"  {name}={value}" for name, value in self._fields(record).items())
        line = f"{_timestamp(record)} {record.levelname:7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def log_to(stream: TextIO | None, form: str, fields: Fields) -> logging.Logger:
    """Make this the only handler of the root logger, and return that. None is stderr; `form` is json or console."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter((JsonLines if form == "json" else ConsoleLines)(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.captureWarnings(True)
    return root


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def start_logging(form: str, level: str, worker: int | None = None) -> None:
    """Log a run to stderr, each line with its worker's number and the log fields.

    An app that configures logging when it is imported does so later, and wins.
    """
    install()

    def fields(record: logging.LogRecord) -> dict[str, Any]:
        values = {"worker": getattr(record, "worker", worker)} | {
            name: getattr(record, name, "") for name in FIELDS
        }
        return {name: value for name, value in values.items() if value not in (None, "")}

    root = log_to(None, form, fields)
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
