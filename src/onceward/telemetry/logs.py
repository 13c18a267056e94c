"""Log fields and formats of log lines.

Importing onceward changes no logging. To have `transaction_id`, `task`, `step`, `attempt`, `trace_id` and `span_id` on
your own records, add the filter `LogFields` to your handlers; onceward's own lines always have them. Lines are JSON
objects for machines or plain text for people, and never contain a payload.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from opentelemetry import trace

from onceward._text import printable, printable_lines
from onceward.telemetry.context import current_work
from onceward.telemetry.redaction import DEEPEST, format_error, redact_line, scrub

FIELDS = ("transaction_id", "task", "step", "attempt", "trace_id", "span_id")

QUIET = ("asyncio", "aiosqlite")
"""Libraries that log every byte at debug level."""

Fields = Callable[[logging.LogRecord], Mapping[str, Any]]
"""Returns the fields that a line shows next to its message."""

STANDARD = frozenset((*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName"))
"""What every record has, and formatters add."""
BELOW = "  | "
"""Before every line of a traceback."""
RESERVED = ("time", "level", "logger", "message", "traceback")
"""What every JSON line has. A field of the same name is shown as `extra.…`."""


def current_fields() -> dict[str, Any]:
    """The log fields of the code that runs here; empty outside an engine."""
    work = current_work.get()
    try:
        span = trace.get_current_span().get_span_context()
    except Exception:  # noqa: BLE001  a span of others, which is not worth a log line
        span = trace.INVALID_SPAN_CONTEXT
    return {
        "transaction_id": "" if work is None else work.transaction_id or "",
        "task": "" if work is None else work.task,
        "step": "" if work is None else work.step,
        "attempt": "" if work is None else work.attempt,
        "trace_id": trace.format_trace_id(span.trace_id) if span.is_valid else "",
        "span_id": trace.format_span_id(span.span_id) if span.is_valid else "",
    }


class LogFields(logging.Filter):
    """Adds the log fields to every record that passes: `handler.addFilter(LogFields())`.

    Outside an engine they are empty, so a format can always name them. Fields that a record already has, from `extra`
    or a record factory, stay as they are.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in current_fields().items():
            record.__dict__.setdefault(name, value)
        return True


def extras(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that a record has beyond those of every record."""
    return {str(name): value for name, value in vars(record).items() if name not in STANDARD}


class LineFormatter(logging.Formatter):
    """Shows no values of a database, also in lines of others."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self._fields = fields

    def message_of(self, record: logging.LogRecord) -> str:
        if record.args:
            for each in record.args.values() if isinstance(record.args, Mapping) else record.args:
                if isinstance(each, BaseException):
                    scrub(each)
        return redact_line(record.getMessage())

    def fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        return {name: _without_values(value) for name, value in self._fields(record).items()}

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei) if ei[1] is None else format_error(ei[1])


def _without_values(field: Any, depth: int = 0) -> Any:
    """Return a field, or what is in it, without the values that an error quotes."""
    if depth < DEEPEST and type(field) in (list, tuple):
        return [_without_values(each, depth + 1) for each in field]
    if depth < DEEPEST and type(field) is dict:
        return {name: _without_values(each, depth + 1) for name, each in field.items()}
    if isinstance(field, BaseException):
        scrub(field)
        field = str(field)
    return redact_line(field) if isinstance(field, str) else field


class JsonLines(LineFormatter):
    """Formats a record as JSON: time, level, logger, message, its fields, and the traceback if it has one.

    `fields` selects them; by default they are the log fields and everything passed as `extra`.
    """

    def __init__(self, fields: Fields = extras) -> None:
        super().__init__(fields)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.message_of(record),
        }
        for name, value in self.fields_of(record).items():
            line[f"extra.{name}" if name in RESERVED else name] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # ASCII only: no character of an id can break the line.
        try:
            return json.dumps(line, default=_as_text)
        except Exception:  # noqa: BLE001  a value of the user: circular, or its __str__ raises
            return json.dumps({name: _as_json(value) for name, value in line.items()})


def _as_text(value: Any) -> str:
    """Return what JSON has no type for."""
    return str(_without_values(value))


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=_as_text))
    except Exception:  # noqa: BLE001
        return f"<{type(value).__name__}>"


class ConsoleLines(LineFormatter):
    """Formats a record as plain text for people: one line, and a traceback that cannot pass for other lines."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f"  {name}={value}" for name, value in self.fields_of(record).items())
        line = printable(f"{_timestamp(record)} {record.levelname:7} {self.message_of(record)}{fields}")
        if not record.exc_info:
            return line
        below = printable_lines(self.formatException(record.exc_info)).split("\n")
        return "\n".join([line, *(f"{BELOW}{each}" for each in below)])


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

    An app that configures logging when it is imported does so later, and wins. JSON lines also have what your code
    passes as `extra`.
    """

    def fields(record: logging.LogRecord) -> dict[str, Any]:
        values = {"worker": worker, **dict.fromkeys(FIELDS, "")}
        found = extras(record)
        values |= found if form == "json" else {name: found[name] for name in values if name in found}
        return {name: value for name, value in values.items() if value is not None and value != ""}

    root = log_to(None, form, fields)
    root.handlers[0].addFilter(LogFields())
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
    _log_uncaught()


def _log_uncaught() -> None:
    """Log what nothing catches: Python would print it with all its values, and not as JSON."""
    log = logging.getLogger("onceward.run")

    def of_thread(ending: threading.ExceptHookArgs) -> None:
        if ending.exc_type is not SystemExit:
            name = "?" if ending.thread is None else ending.thread.name
            log.error("thread %s failed", name, exc_info=ending.exc_value)

    sys.excepthook = lambda kind, error, trace: log.critical("the process failed", exc_info=error)
    threading.excepthook = of_thread
