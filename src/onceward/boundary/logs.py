"""Log lines of a boundary: a JSON object each for machines, one plain line each for people. Never a payload.

Records say what they are about in `extra`; whatever of it is there goes into the line.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, TextIO

FIELDS = ("message_id", "offset", "consumer", "zone", "link", "outcome")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, message, those of `FIELDS` that apply, and an exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII: no character of an id can break the line


class ConsoleFormatter(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f"  {name}={value}" for name, value in _fields(record).items())
        line = f"{_moment(record)} {record.levelname:7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def start_logging(form: str, level: str, stream: TextIO | None = None) -> None:
    """Log to `stream`, stderr by default, as `json` or for the `console`.

    `level` is for what is ours. Libraries are heard from warnings on: at a lower level they tell of every byte.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("onceward").setLevel(level.upper())
    logging.captureWarnings(True)


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found = {name: getattr(record, name, None) for name in FIELDS}
    return {name: value for name, value in found.items() if value is not None}
