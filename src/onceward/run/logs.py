"""Log lines of a run. Each says its worker's number, and what it is about: transaction, task, step, attempt, trace."""

from __future__ import annotations

import logging
from typing import Any

from onceward.telemetry import logs
from onceward.telemetry.lines import log_to

QUIET = ("asyncio", "aiosqlite")
"""Libraries that tell of every byte at the level of debugging."""


def start_logging(form: str, level: str, worker: int | None = None) -> None:
    """Log to stderr. What an app sets up for itself when it is imported comes later, and so wins."""
    logs.install()

    def fields(record: logging.LogRecord) -> dict[str, Any]:
        told = {"worker": getattr(record, "worker", worker)} | {
            name: getattr(record, name, "") for name in logs.FIELDS
        }
        return {name: value for name, value in told.items() if value not in (None, "")}

    root = log_to(None, form, fields)
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
