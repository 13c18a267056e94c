"""Removes facts after the retention time of their class, whether they were read or not. Operators are alerted before a
fact expires that a consumer has not confirmed, and when it does.

What has expired is gone permanently, so a wrong clock must not decide it. The clock is compared with the time since the
machine started: nothing expires after it was set to another time, whether a server ran meanwhile or not. After a start
of the machine there is nothing to compare with: if the time since a server last ran seems to be more than half of what
a class is kept for, an operator has to confirm it. And one sweep removes only a share of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from math import ceil, inf

from onceward._time import Moment, WatchedClock
from onceward.boundary.boundary import Boundary, tolerance_of
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
SHARE = 0.1
"""Fraction of the log that one sweep may remove, unless the retention is so short that more expires between two."""
AGAIN = 3600.0
"""Seconds after which the log says again that a consumer is late, while it is."""
LEAST = 10
"""Facts that one sweep may remove, however few there are."""
UNSEEN = 0.5
"""Fraction of a retention time for which the machine may be off."""
SHORTEST_UNSEEN = 3600.0
"""Seconds for which it may be off, however short the retention is."""
CONFIRM = "onceward boundary trust-clock"


class Retention:
    """Removes expired facts periodically while it runs."""

    def __init__(
        self, boundary: Boundary, *, every: float = EVERY, clock: Callable[[], float] | None = None
    ) -> None:
        """`clock` returns seconds since 1970. A given one never jumps while this runs; by default, the boundary's clock
        is compared with the time since the machine started."""
        self._boundary = boundary
        self._every = every
        self._doubt = ClockDoubt(boundary, clock)
        self._task: asyncio.Task[None] | None = None
        self._logged: dict[tuple[str, str], float] = {}
        """When the log last said which outcome of which consumer."""

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
        store = self._boundary.store
        expiring = await self._doubt.certain_classes()
        now = self._doubt.clock.now()
        cursors = await store.cursors()
        late = {cursor.name for cursor in cursors if await self._alert(cursor, now, expiring)}
        self._logged = {what: at for what, at in self._logged.items() if what[0] in late}
        older_than = {stream: int((now - seconds) * 1000) for stream, seconds in expiring.items()}
        expired = await store.expire(older_than, await self._at_most()) if older_than else 0
        self._boundary.metrics.expired.inc(expired)
        return expired

    async def _at_most(self) -> int:
        bounds = await self._boundary.store.bounds()
        share = max(SHARE, 2 * self._every / self._boundary.settings.shortest_retention)
        return max(LEAST, ceil((bounds.last - bounds.first + 1) * share))

    async def _alert(self, cursor: Cursor, now: float, expiring: dict[str, float]) -> bool:
        """Check the first unconfirmed fact, which is usually the oldest. Return whether the consumer is late."""
        metrics = self._boundary.metrics
        oldest = await self._boundary.store.read(cursor.offset, 1)
        if not oldest:
            metrics.expiring.labels(cursor.name).set(0)
            return False
        fact = stored(oldest[0])
        stream = stream_of(fact.envelope)
        kept_for = expiring.get(stream, inf)
        age = now - fact.appended_at_unix_ms / 1000
        is_late = age >= kept_for * WARN_AT
        metrics.expiring.labels(cursor.name).set(is_late)
        if age > kept_for:
            metrics.lost.labels(cursor.name).inc()
        outcome = "expired" if age > kept_for else "expiring"
        if not is_late or not self._is_news((cursor.name, outcome), now):
            return is_late
        fields = {
            "consumer": cursor.name,
            "offset": fact.offset,
            "message_id": fact.message_id,
            "outcome": outcome,
        }
        if age > kept_for:
            _log.error(
                "facts of class %s expire before consumer %s has confirmed them, from offset %d on; its next fetch "
                "reports the gap",
                stream,
                cursor.name,
                fact.offset,
                extra=fields,
            )
        else:
            _log.warning(
                "consumer %s has not confirmed offset %d, which expires in %.0f s: start it, or keep facts of class %s "
                "longer",
                cursor.name,
                fact.offset,
                kept_for - age,
                stream,
                extra=fields,
            )
        return True

    def _is_news(self, what: tuple[str, str], now: float) -> bool:
        """Whether the log has not said it lately: a name that nobody uses any more is late forever."""
        if what in self._logged and 0 <= now - self._logged[what] < AGAIN:
            return False
        self._logged[what] = now
        return True


class ClockDoubt:
    """Decides for which classes the clock is certain enough to remove facts, and warns operators if it is not."""

    def __init__(self, boundary: Boundary, clock: Callable[[], float] | None) -> None:
        self._boundary = boundary
        if clock is not None:
            tolerance = tolerance_of(boundary.settings.shortest_retention)
            boundary.clock = WatchedClock(clock, clock, boot="", tolerance=tolerance)
        self.clock = boundary.clock
        self._stored: Moment | None = None
        """The trusted time in the store, when this last looked; of a store without one, that of its newest fact."""
        self._unseen: float | None = None
        """Seconds that seem to have passed while this machine was off; None until the clock is plausible."""
        self._halted = ""

    async def certain_classes(self) -> dict[str, float]:
        """Return the classes whose facts may expire, with the seconds that each is kept for."""
        await self._look()
        if self.clock.jump() or self._unseen is None:
            return {}
        kept_for = {stream: self._boundary.settings.retention_seconds(stream) for stream in STREAMS}
        certain = {
            stream: seconds
            for stream, seconds in kept_for.items()
            if self._unseen <= max(SHORTEST_UNSEEN, seconds * UNSEEN)
        }
        if len(certain) == len(kept_for):
            self._resume()
            self._stored = self.clock.moment()
            await self._boundary.store.trust_time(self._stored)
        else:
            self._halt(
                "the last time known to be right is %s ago, before this machine was started: either it was off, or its "
                "clock is wrong; facts of class %s do not expire",
                _span(self._unseen),
                " and ".join(stream for stream in kept_for if stream not in certain),
            )
        return certain

    async def _look(self) -> None:
        """Compare the clock with the time in the store, and with the time since the machine started."""
        before = self._stored
        self._stored = await self._boundary.store.trusted_time() or await self._newest_fact()
        is_new = before is not None and self._stored != before
        if is_new and self._stored is not None and self.clock.agrees(self._stored):
            self.clock.trust()  # an operator, or a server with the right time, agrees with this clock
            self._unseen = 0.0
        elif self._unseen is None:
            self._begin()
        if jump := self.clock.jump():
            self._halt(
                "the clock of this machine is %s %s: it was set to %s; no fact expires",
                _span(abs(jump)),
                "ahead" if jump > 0 else "behind",
                _date(self.clock.wall()),
            )

    def _begin(self) -> None:
        clock, stored = self.clock, self._stored
        passed = None if stored is None else clock.since(stored)
        if stored is not None and passed is not None:
            clock.assume(stored.at + passed)
        elif stored is not None and clock.is_behind(stored):
            if not clock.jump():
                clock.assume(stored.at)  # as on a machine that has not asked for the time since it started
            return
        else:
            clock.trust()
        self._unseen = 0.0 if stored is None or passed is not None else clock.off_since(stored)

    async def _newest_fact(self) -> Moment | None:
        store = self._boundary.store
        newest = await store.read((await store.bounds()).last - 1, 1)
        return Moment(newest[0][2] / 1000) if newest else None

    def _halt(self, reason: str, *values: object) -> None:
        self._boundary.metrics.expiry_halted.set(1)
        self._boundary.expiry_halted = reason % values
        if reason != self._halted:
            self._halted = reason
            _log.warning(
                f"{reason} until the clock is corrected, or you confirm that it is right: `%s --store STORE`",
                *values,
                CONFIRM,
                extra={"outcome": "expiry_halted"},
            )

    def _resume(self) -> None:
        self._boundary.metrics.expiry_halted.set(0)
        self._boundary.expiry_halted = ""
        if self._halted:
            self._halted = ""
            _log.info("the time is right again: facts expire as usual", extra={"outcome": "expiry_resumed"})


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _span(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.1f} hours"
