"""Spans as a span file has them, and reading them. Needs no OpenTelemetry SDK."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

FILE_VARIABLE = "ONCEWARD_TRACE_FILE"
"""The variable that names the file to write."""

FOLDER = Path(".onceward")
"""Where span files are looked for."""


class Retry(msgspec.Struct, frozen=True):
    """Another attempt was decided on."""

    step: str
    attempt: int
    """The one that failed, from 0."""
    delay: float


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of a span."""

    trace: str
    id: str
    name: str
    began: int
    """Nanoseconds since 1970."""
    ended: int
    process: int
    parent: str | None = None
    failed: bool = False
    service: str = ""
    attributes: dict[str, Any] = {}
    retries: list[Retry] = []

    @property
    def seconds(self) -> float:
        return (self.ended - self.began) / 1e9


class SpanFile(msgspec.Struct, frozen=True):
    """What was read."""

    path: Path
    spans: list[Span]
    unreadable: int
    """Lines that are no span, such as the last one of a process that was killed while it wrote."""


def older(path: Path) -> Path:
    """Where a full span file goes."""
    return path.with_name(f"{path.name}.1")


def read(path: Path) -> SpanFile:
    """The file, and the full one before it."""
    spans, unreadable = [], 0
    decode = msgspec.json.Decoder(Span).decode
    for line in _lines(path):
        try:
            spans.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            unreadable += 1
    return SpanFile(path, spans, unreadable)


def _lines(path: Path) -> Iterator[bytes]:
    for each in (older(path), path):
        if each == path or each.exists():
            with each.open("rb") as file:
                yield from (line for line in file if line.strip())


def newest() -> Path | None:
    """The file that spans are written to here, or were last."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    return max(FOLDER.glob("*.jsonl"), key=lambda each: each.stat().st_mtime, default=None)
