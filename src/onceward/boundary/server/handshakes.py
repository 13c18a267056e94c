"""Reports TLS handshakes that failed: Envoy writes a line for every connection that ends."""

from __future__ import annotations

import asyncio
import logging
import os

import msgspec

from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.tls import why_refused
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

CHUNK = 65536


class ConnectionEnd(msgspec.Struct):
    """Why, and at which point."""

    peer: str
    shown: str | None = None
    """The peer's certificate; None if the handshake did not get to it."""
    reason: str | None = None
    end: str | None = None


class Handshakes:
    def __init__(self, file: int, metrics: BoundaryMetrics) -> None:
        self._file = file
        self._metrics = metrics
        self._rest = b""

    def start(self) -> None:
        os.set_blocking(self._file, False)
        asyncio.get_running_loop().add_reader(self._file, self._read)

    def _read(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._file, CHUNK)).split(b"\n")
        for line in lines:
            ended = msgspec.json.decode(line, type=ConnectionEnd)
            if ended.shown is None or ended.reason:
                self._metrics.handshake_errors.inc()
                why = why_refused(ended.reason or "", ended.end or "")
                _log.warning(
                    "TLS handshake with %s failed: %s", ended.peer, why, extra={"outcome": "refused"}
                )
