"""Log lines: a JSON object each for machines, one plain line each for people. Never a payload."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

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
