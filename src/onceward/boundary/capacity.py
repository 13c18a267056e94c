"""How full a store is, and what to do about it: refuse new facts or, only if configured, remove the oldest."""

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
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

MEASURE_EVERY = 0.25
"""Seconds. The store is not asked for its size with every fact."""
ROOM = 0.05
"""Fraction of the capacity that dropping frees beyond what it must, so it does not happen for every fact."""


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
        self._measured_at = -math.inf
        self._fraction = 0.0
        self._dropping = asyncio.Lock()

    async def percent(self) -> float:
        """Return how full the store is; 0 if it has no capacity limit."""
        return 100 * min(1.0, await self._measure()) if self._settings.capacity_bytes is not None else 0.0

    async def make_room(self) -> None:
        """Raise `Backpressure`, or drop the oldest facts, if the store is too full. Needs a capacity limit."""
        if self._clock() - self._measured_at >= MEASURE_EVERY:
            await self._measure()
        if self._fraction < self._settings.backpressure_at:
            return
        if not self._settings.drop_oldest:
            raise Backpressure(
                f"the store is {self._fraction:.0%} full, and accepts facts up to "
                f"{self._settings.backpressure_at:.0%}; try again later, with the same id"
            )
        async with self._dropping:
            if await self._measure() >= self._settings.backpressure_at:
                await self._drop()

    async def _measure(self) -> float:
        assert self._settings.capacity_bytes is not None
        self._measured_at = self._clock()
        self._fraction = await self._log.size() / self._settings.capacity_bytes
        return self._fraction

    async def _drop(self) -> None:
        bounds = await self._log.bounds()
        count = bounds.last - bounds.first + 1
        surplus = 1 - max(self._settings.backpressure_at - ROOM, 0) / self._fraction
        through = bounds.first - 1 + max(1, math.ceil(count * surplus))
        dropped = await self._log.drop(min(through, bounds.last))
        self._metrics.dropped.inc(dropped)
        _log.warning(
            "dropped the %d oldest facts, up to offset %d: the store was %.0f %% full",
            dropped,
            through,
            100 * self._fraction,
            extra={"offset": through, "outcome": "dropped"},
        )
        await self._measure()
