"""What a simulated relay waits by, in place of pipes, inotify and LISTEN."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from onceward._process.stop import engine_stop
from tests.simulation.loop import here
from tests.simulation.threads import block, switch_perhaps


class SimulatedDoorbell:
    """As `onceward._process.readiness.Doorbell`, which is its own file."""

    def __init__(self) -> None:
        self.is_rung = False
        self.waiting: set[asyncio.Future[None]] = set()

    def fd(self) -> SimulatedDoorbell:
        return self

    def ring(self) -> None:
        self.wake()
        switch_perhaps()

    def wake(self) -> None:
        """Ring from outside of a simulated thread."""
        self.is_rung = True
        for each in self.waiting:
            _end(each)

    def clear(self) -> None:
        self.is_rung = False
        switch_perhaps()


class SimulatedNews:
    """As `onceward.outbox.news.News`. A commit rings its bell; one between two waits ends the next wait."""

    def __init__(self, *, hears: bool) -> None:
        self.hears = hears
        self.bell = SimulatedDoorbell()
        self._has_begun = False

    def begin(self) -> bool:
        """The first time, something may have been committed before it listened."""
        before, self._has_begun = self._has_begun, True
        return not before

    def wait(self, seconds: float, *doors: SimulatedDoorbell) -> bool:
        is_time = _wait([self.bell, *doors], seconds)
        self.bell.is_rung = False
        return is_time

    def looked(self, found: bool) -> None:
        return

    def close(self) -> None:
        return


def _wait(bells: Sequence[SimulatedDoorbell], seconds: float) -> bool:
    """Return whether one of them is rung; False after that time, or when the engine's call is stopped."""
    stop: Any = engine_stop()
    woken = here().loop.create_future()
    with nullcontext() if stop is None else stop.calling(partial(_end, woken)):
        if not any(each.is_rung for each in bells) and (stop is None or not stop.requested):
            for each in bells:
                each.waiting.add(woken)
            block(asyncio.wait([woken], timeout=max(seconds, 0.0)))
            for each in bells:
                each.waiting.discard(woken)
    return any(each.is_rung for each in bells)


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
