"""Spans in a local file, for `onceward trace`: one JSON object a line, from as many processes as like to.

A batch of spans is one write under the file's lock. When the file is full it becomes `….1`, in place of the one that
was that before; so two files are kept, of about `LIMIT` bytes each at most.

Kept are times, names, the status, retries, and the attributes of the catalogue with the fields that were named in
`EngineSettings.telemetry_fields`. What other libraries put on their spans is left out: it might be a payload.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from onceward.telemetry.catalogue import RETRY_EVENT, SPAN_ATTRIBUTES
from onceward.telemetry.span_file import Retry, Span, older

LIMIT = 32 * 1024 * 1024
"""Bytes after which another file is begun."""

NAMED = ("payload.", "metadata.", "result.")
"""How the attributes begin that are there because somebody asked for them."""

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class SpanFileExporter(SpanExporter):
    """Appends spans to a file, which is made with its folder."""

    def __init__(self, path: str | os.PathLike[str], limit: int = LIMIT) -> None:
        self.path = Path(path)
        self._limit = limit

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = b"".join(_encode(span_of(span)) + b"\n" for span in spans)
        try:
            with self._locked(len(lines)) as file:
                written = os.write(file, lines)
        except OSError as error:
            _log.warning("%s spans are not in %s: %s", len(spans), self.path, error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS if written == len(lines) else SpanExportResult.FAILURE

    @contextmanager
    def _locked(self, length: int) -> Iterator[int]:
        """The file with room for so many bytes, ours alone."""
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # let go by close
                size = os.fstat(file).st_size
                if not self._is_current(file):
                    continue  # somebody has begun another one meanwhile
                if size and size + length > self._limit:
                    os.replace(self.path, older(self.path))
                    continue
                yield file
                return
            finally:
                os.close(file)

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False


def span_of(span: ReadableSpan) -> Span:
    context, parent = span.context, span.parent
    assert context is not None
    return Span(
        trace=format_trace_id(context.trace_id),
        id=format_span_id(context.span_id),
        parent=None if parent is None else format_span_id(parent.span_id),
        name=span.name,
        began=span.start_time or 0,
        ended=span.end_time or 0,
        failed=span.status.status_code is StatusCode.ERROR,
        service=str(span.resource.attributes.get("service.name", "")),
        process=os.getpid(),
        attributes=_kept(span.attributes or {}),
        retries=[
            msgspec.convert(dict(event.attributes or {}), Retry)
            for event in span.events
            if event.name == RETRY_EVENT
        ],
    )


def _kept(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in attributes.items() if name in SPAN_ATTRIBUTES or name.startswith(NAMED)
    }
