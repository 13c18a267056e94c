"""How full a store is, and what is done about it: refuse new facts, or, only when asked, remove the oldest."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from onceward.boundary.errors import Backpressure
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.settings import BoundarySettings
from onceward.boundary.store import FactLog

_log = logging.getLogger("onceward.boundary")

LOOK_EVERY = 0.25
"""Seconds. Nobody asks the store for its size with every fact."""
ROOM = 0.05
"""The part of the capacity that dropping makes free beyond what it must, so that it is not done for every fact."""


class Fill:
    def __init__(
        self,
        log: FactLog,
        settings: BoundarySettings,
        metrics: BoundaryMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._looked_at = -math.inf
        self._part = 0.0
        self._dropping = asyncio.Lock()

    async def percent(self) -> float:
        """0 where nobody said how much the store may hold."""
        return 100 * min(1.0, await self._look()) if self._settings.capacity_bytes is not None else 0.0

    async def make_room(self) -> None:
        """Before a fact is appended, where there is a capacity: raises `Backpressure`, or drops the oldest facts."""
        if self._clock() - self._looked_at >= LOOK_EVERY:
            await self._look()
        if self._part < self._settings.backpressure_at:
            return
        if not self._settings.drop_oldest:
            raise Backpressure(
                f"the store is {self._part:.0%} full, and takes facts up to {self._settings.backpressure_at:.0%}; try "
                "again later, with the same id"
            )
        async with self._dropping:
            if await self._look() >= self._settings.backpressure_at:
                await self._drop()

    async def _look(self) -> float:
        assert self._settings.capacity_bytes is not None
        self._looked_at = self._clock()
        self._part = await self._log.size() / self._settings.capacity_bytes
        return self._part

    async def _drop(self) -> None:
        bounds = await self._log.bounds()
        count = bounds.last - bounds.first + 1
        superfluous = 1 - max(self._settings.backpressure_at - ROOM, 0) / self._part
        through = bounds.first - 1 + max(1, math.ceil(count * superfluous))
        dropped = await self._log.drop(min(through, bounds.last))
        self._metrics.dropped.inc(dropped)
        _log.warning(
            "dropped the %d oldest facts, up to offset %d: the store was %.0f %% full",
            dropped,
            through,
            100 * self._part,
            extra={"offset": through, "outcome": "dropped"},
        )
        await self._look()
