"""Read span files. Does not need the OpenTelemetry SDK."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

FILE_VARIABLE = "ONCEWARD_TRACE_FILE"
"""The environment variable with the path of the file to write."""

FOLDER = Path(".onceward")
"""Where `newest` searches for span files."""

MOST_READ = 256 * 1024 * 1024
"""Bytes of a file. One that is written here is renamed at an eighth of this; a device may have no end."""
LONGEST_LINE = 1024 * 1024
"""Bytes. What is longer is not a span."""


class Retry(msgspec.Struct, frozen=True):
    """A failed attempt that is followed by another one."""

    step: str
    attempt: int
    """Number of the failed attempt, from 0."""
    delay: float


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A span, as stored in a span file."""

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
    """The contents of a span file."""

    path: Path
    spans: list[Span]
    unreadable: int
    """Number of lines that are not spans, such as the last line of a process killed while writing."""


def older(path: Path) -> Path:
    """The path a full span file is renamed to."""
    return path.with_name(f"{path.name}.1")


def read(path: Path) -> SpanFile:
    """Read this file and the full one before it. Raise ValueError if one has more than `MOST_READ` bytes."""
    spans, unreadable = [], 0
    decode = msgspec.json.Decoder(Span).decode
    for line in _lines(path):
        try:
            spans.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            unreadable += 1
    return SpanFile(path, spans, unreadable)


def _lines(path: Path) -> Iterator[bytes]:
    for each in (older(path), path) if path.name else (path,):
        if each == path or each.exists():
            with each.open("rb") as file:
                size = 0
                while line := file.readline(LONGEST_LINE):
                    size += len(line)
                    if size > MOST_READ:
                        raise ValueError(f"it has more than {MOST_READ // 1024**2} MiB")
                    if line.strip():
                        yield line


def newest() -> Path | None:
    """The file spans are written to, or else the most recent one; None if there is none."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    return max(FOLDER.glob("*.jsonl"), key=lambda each: each.stat().st_mtime, default=None)
