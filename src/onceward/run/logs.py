"""Log lines of a run: a JSON object each for machines, one plain line each for people. Never a payload.

Every line of a worker says its number, and what it is about: transaction, task, step, attempt, trace.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from onceward.telemetry import logs

QUIET = ("asyncio", "aiosqlite")
"""Libraries that tell of every byte at the level of debugging."""


class _Lines(logging.Formatter):
    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._worker = worker

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        told = {name: getattr(record, name, "") for name in logs.FIELDS}
        worker = getattr(record, "worker", self._worker)
        return {
            **({} if worker is None else {"worker": worker}),
            **{name: value for name, value in told.items() if value != ""},
        }


class JsonLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII: no character of an id can break the line


class ConsoleLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f"  {name}={value}" for name, value in self.fields(record).items())
        line = f"{_moment(record)} {record.levelname:7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def start_logging(form: str, level: str, worker: int | None = None) -> None:
    """Log to stderr. What an app sets up for itself when it is imported comes later, and so wins."""
    logs.install()
    handler = logging.StreamHandler()
    handler.setFormatter((JsonLines if form == "json" else ConsoleLines)(worker))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
    logging.captureWarnings(True)


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
