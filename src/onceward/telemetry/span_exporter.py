"""Write spans to a local file, for `onceward trace`: one JSON object per line, from any number of processes.

A batch of spans is one write under the file's lock. A full file is renamed to `….1`, replacing the previous one, so
there are at most two files of about `LIMIT` bytes each.

A span keeps its times, name, status and retries, the attributes of the catalogue, and the fields listed in
`EngineSettings.telemetry_fields`. Attributes of other libraries are dropped: they might contain a payload.
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

from onceward._files.private import create_file, make_directory
from onceward.telemetry.catalogue import RETRY_EVENT, SPAN_ATTRIBUTES
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.span_file import Retry, Span, older

LIMIT = 32 * 1024 * 1024
"""Bytes after which a new file is started."""

REQUESTED = ("payload.", "metadata.", "result.")
"""Prefixes of attributes that `EngineSettings.telemetry_fields` asked for."""

_log = OwnLogger(logging.getLogger("onceward.telemetry.spanfile"))
_encode = msgspec.json.Encoder().encode


class SpanFileExporter(SpanExporter):
    """Appends spans to a file; creates it and its folder."""

    def __init__(self, path: str | os.PathLike[str], limit: int = LIMIT) -> None:
        self.path = Path(path)
        self._limit = limit

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = b"".join(_encode(span_of(span)) + b"\n" for span in spans)
        try:
            with self._locked(len(lines)) as file:
                written = os.write(file, lines)
        except OSError as error:
            _log.warning("could not write %s spans to %s: %s", len(spans), self.path, error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS if written == len(lines) else SpanExportResult.FAILURE

    @contextmanager
    def _locked(self, length: int) -> Iterator[int]:
        """Open the file, locked, with room for this many bytes."""
        while True:
            make_directory(self.path.parent)
            create_file(self.path)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # released by close
                size = os.fstat(file).st_size
                if not self._is_current(file):
                    continue  # another process has renamed it meanwhile
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
        attributes=_filter(span.attributes or {}),
        retries=[
            msgspec.convert(dict(event.attributes or {}), Retry)
            for event in span.events
            if event.name == RETRY_EVENT
        ],
    )


def _filter(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if name in SPAN_ATTRIBUTES or name.startswith(REQUESTED)
    }
