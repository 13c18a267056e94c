"""How full a store is, and what to do about it: the store refuses new facts or, only if configured, the oldest go."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence

from onceward.boundary.errors import Backpressure, InvalidArgument
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.settings import BoundarySettings
from onceward.boundary.store import FactLog, NewFact, Outcome
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

ROOM = 0.05
"""Fraction of the capacity that dropping frees beyond what it must, so it does not happen for every fact."""
TRIES = 5
"""How often an append makes room before it is refused, because others took it."""
AROUND_FACT = 600
"""Bytes that a store needs for a fact at most, in addition to its record and its id, which may be in an index, too."""


class Fill:
    def __init__(self, log: FactLog, settings: BoundarySettings, metrics: BoundaryMetrics) -> None:
        self._log = log
        self._capacity = settings.capacity_bytes or 0
        self._metrics = metrics
        self._dropping = asyncio.Lock()
        self.limit = int(self._capacity * settings.backpressure_at) if self._capacity else None
        """Bytes that facts may take; None is no limit."""
        self.may_drop = settings.drop_oldest and self.limit is not None

    async def percent(self) -> float:
        """Return how full the store is; 0 if it has no capacity limit."""
        return 100 * min(1.0, await self._log.size() / self._capacity) if self._capacity else 0.0

    def problem(self, fact: NewFact) -> InvalidArgument | None:
        """Return the error for a fact that would not fit into an empty store: waiting does not help."""
        size = _bytes_of(fact)
        if self.limit is None or size <= self.limit:
            return None
        return InvalidArgument(
            "fact.object_json",
            f"makes a fact of about {size:,} bytes, but all facts of this boundary may take {self.limit:,}; "
            "put it into an object and refer to that, or raise the boundary's capacity",
        )

    async def append_dropping(self, facts: Sequence[NewFact]) -> list[Outcome]:
        """Drop the oldest facts until these fit, and append them."""
        async with self._dropping:  # otherwise many callers would take the room from each other
            for _ in range(TRIES):
                await self._make_room(sum(map(_bytes_of, facts)))
                outcomes = await self._log.append_all(facts)
                if not any(isinstance(each, Backpressure) for each in outcomes):
                    return outcomes
        return await self._log.append_all(facts)

    def portions(self, facts: Sequence[NewFact]) -> Iterator[Sequence[NewFact]]:
        """Split in order. One that does not fit into an empty store is alone. If the oldest may be dropped, the room
        for a portion can be freed without dropping a part of it."""
        if self.limit is None:
            if facts:
                yield facts
            return
        most = ROOM * self._capacity if self.may_drop else math.inf
        portion: list[NewFact] = []
        size = 0
        is_alone = False
        for fact in facts:
            is_large = _bytes_of(fact) > self.limit
            size += _bytes_of(fact)
            if portion and (size > most or is_large or is_alone):
                yield portion
                portion, size = [], _bytes_of(fact)
            portion.append(fact)
            is_alone = is_large
        if portion:
            yield portion

    async def _make_room(self, needed: int) -> None:
        limit = self.limit or 0
        while (size := await self._log.size()) + needed > limit:
            bounds = await self._log.bounds()
            count = bounds.last - bounds.first + 1
            if count == 0:
                return
            left = max(limit - needed - ROOM * self._capacity, 0)
            through = min(bounds.first - 1 + max(1, math.ceil(count * (1 - left / size))), bounds.last)
            dropped = await self._log.drop(through)
            self._metrics.dropped.inc(dropped)
            _log.warning(
                "dropped the %d oldest facts, up to offset %d: the store was %.0f %% full",
                dropped,
                through,
                100 * size / self._capacity,
                extra={"offset": through, "outcome": "dropped"},
            )


def _bytes_of(fact: NewFact) -> int:
    return len(fact.record) + 2 * len(fact.message_id) + AROUND_FACT
