"""Compressed messages. A few kilobytes can expand to many megabytes, which count like those that arrive."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from connectrpc.compression.gzip import GzipCompression


class Arriving(Protocol):
    def expand(self, size: int) -> None:
        """Count a message with the bytes that it has expanded to, or refuse it."""

    def waste(self, size: int) -> None:
        """Take note of bytes that the error of this call may hold."""


ARRIVING: ContextVar[Arriving] = ContextVar("arriving")
"""The messages of the current call."""


class CountedGzip(GzipCompression):
    def decompress(self, data: bytes | bytearray | memoryview, read_max_bytes: int | None = None) -> bytes:
        arriving = ARRIVING.get(None)
        try:
            plain = super().decompress(data, read_max_bytes)
        except Exception:
            if arriving is not None:
                arriving.waste(read_max_bytes or 0)  # at most, by then
            raise
        if arriving is not None:
            arriving.expand(len(plain))
        return plain
