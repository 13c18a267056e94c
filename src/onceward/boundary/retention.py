"""Removes facts after the retention time of their class, whether they were read or not. Operators are alerted before a
fact expires that a consumer has not confirmed, and when it does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from onceward.boundary.boundary import Boundary
from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import STREAMS, stream_of
from onceward.boundary.store import Cursor
from onceward.boundary.wire import stored
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

EVERY = 60.0
"""Seconds between two sweeps."""
WARN_AT = 0.8
"""Fraction of its retention time after which an unconfirmed fact is worth an alert."""


class Retention:
    """Removes expired facts periodically while it runs."""

    def __init__(
        self, boundary: Boundary, *, every: float = EVERY, clock: Callable[[], float] = time.time
    ) -> None:
        self._boundary = boundary
        self._every = every
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Return the task, which runs until `close`."""
        self._task = asyncio.create_task(self._run(), name="onceward-boundary-retention")
        return self._task

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.sweep()
            except BoundaryError as error:
                _log.warning("facts could not be expired, will try again: %s", error)
            await asyncio.sleep(self._every)

    async def sweep(self) -> int:
        """Alert, then remove. Return how many facts were removed."""
        now, settings, store = self._clock(), self._boundary.settings, self._boundary.store
        for cursor in await store.cursors():
            await self._alert(cursor, now)
        older_than = {stream: int((now - settings.retention_seconds(stream)) * 1000) for stream in STREAMS}
        expired = await store.expire(older_than)
        self._boundary.metrics.expired.inc(expired)
        return expired

    async def _alert(self, cursor: Cursor, now: float) -> None:
        """Check the first unconfirmed fact, which is usually the oldest."""
        metrics = self._boundary.metrics
        oldest = await self._boundary.store.read(cursor.offset, 1)
        if not oldest:
            metrics.expiring.labels(cursor.name).set(0)
            return
        fact = stored(oldest[0])
        stream = stream_of(fact.envelope)
        kept_for = self._boundary.settings.retention_seconds(stream)
        age = now - fact.appended_at_unix_ms / 1000
        metrics.expiring.labels(cursor.name).set(age >= kept_for * WARN_AT)
        fields = {
            "consumer": cursor.name,
            "offset": fact.offset,
            "message_id": fact.message_id,
            "outcome": "expired" if age > kept_for else "expiring",
        }
        if age > kept_for:
            metrics.lost.labels(cursor.name).inc()
            _log.error(
                "facts of class %s expire before consumer %s has confirmed them, from offset %d on; its next fetch "
                "reports the gap",
                stream,
                cursor.name,
                fact.offset,
                extra=fields,
            )
        elif age >= kept_for * WARN_AT:
            _log.warning(
                "consumer %s has not confirmed offset %d, which expires in %.0f s: start it, or keep facts of class %s "
                "longer",
                cursor.name,
                fact.offset,
                kept_for - age,
                stream,
                extra=fields,
            )
