"""Log fields: every record made under an engine says which task, step, attempt and transaction it belongs to.

`transaction_id`, `task`, `step`, `attempt`, `trace_id` and `span_id` are attributes of every `LogRecord`, empty
outside an engine, so that any formatter can name them.
"""

from __future__ import annotations

import logging
from typing import Any

from opentelemetry import trace

from onceward.telemetry.scope import current_work

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
