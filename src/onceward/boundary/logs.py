"""Log lines of a boundary. Records say what they are about in `extra`; whatever of it is there goes into the line."""

from __future__ import annotations

import logging
from typing import Any, TextIO

from onceward.telemetry.lines import log_to

FIELDS = ("message_id", "offset", "consumer", "zone", "link", "outcome")


def start_logging(form: str, level: str, stream: TextIO | None = None) -> None:
    """Log to `stream`, stderr by default, as `json` or for the `console`.

    `level` is for what is ours. Libraries are heard from warnings on: at a lower level they tell of every byte.
    """
    root = log_to(stream, form, fields)
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("onceward").setLevel(level.upper())


def fields(record: logging.LogRecord) -> dict[str, Any]:
    found = {name: getattr(record, name, None) for name in FIELDS}
    return {name: value for name, value in found.items() if value is not None}
