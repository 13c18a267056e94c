"""The supervisor: starts the workers, starts anew those that end, and ends them in good order.

first SIGTERM or Ctrl-C    drain   no new fetch; what is in flight ends, and its source is told
second, or `grace` over    hurry   what is in flight is cut off, and left to its lease
third, or that too long    kill
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import Counter
from enum import IntEnum
from typing import Protocol

import msgspec

from onceward.backoff import Backoff
from onceward.run.protocol import (
    CUT_OFF,
    DRAIN,
    ENDED,
    HURRY,
    MISUSED,
    RECYCLED,
    UNREACHABLE,
    Assignment,
    WorkerStatus,
)
from onceward.run.worker_process import WorkerProcess, ending

# What a run has come to, summed up at its end.


class Totals:
    """What each consumer has done, in all workers that have ended, as far as they could still say it."""

    def __init__(self) -> None:
        self._of: dict[str, Counter[str]] = {}

    def add(self, last: WorkerStatus | None) -> None:
        for each in last.consumers if last is not None else ():
            counts = {"succeeded": each.succeeded, "failed": each.failed, "given back": each.returned}
            self._of.setdefault(each.name, Counter()).update(counts)

    @property
    def failed(self) -> int:
        return sum(counts["failed"] for counts in self._of.values())

    def __str__(self) -> str:
        return "; ".join(f"{name}: {_listed(counts)}" for name, counts in self._of.items()) or "nothing done"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count or what == "succeeded")


_log = logging.getLogger("onceward.run")

FAILED = 1
RESTART = Backoff(0.5, cap=30.0)
"""Until a worker that crashed is started again."""
STEADY = 30.0
"""Seconds after which a worker has worked for a while: its next crash counts as the first."""
GIVEN_UP = 10
"""Crashes in a row after which a run that is to end by itself does so."""
HURRY_PATIENCE = 5.0
"""Seconds until a worker that was told to hurry is killed. It leaves by itself before that."""
RELOAD_PATIENCE = 3.0
"""Seconds that work in flight has to end when the code has changed."""


class Stage(IntEnum):
    RUNNING = 0
    DRAINING = 1
    HURRYING = 2
    KILLING = 3


class Changes(Protocol):
    """What tells that the code has changed."""

    async def next(self) -> str: ...


class WorkerSlot:
    """Where one worker after the other works."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: WorkerProcess | None = None
        """None while there is none: before the first, between two, after the last."""
        self.restarts = 0
        self.crashes = 0
        """In a row."""
        self.problem: str | None = None
        """How the last one ended, if that was not well."""
        self.replacing = False
        """It was asked to make room for new code."""


class Supervisor:
    """`await run()` in an event loop; `heard` is told of signals."""

    def __init__(self, assignment: Assignment, processes: int, changes: Changes | None = None) -> None:
        self.places = [WorkerSlot(number) for number in range(1, processes + 1)]
        self.stage = Stage.RUNNING
        self._assignment = assignment
        self._changes = changes
        self._signal: int | None = None
        self._code = ENDED
        self._cut_off = False
        self._totals = Totals()
        self._waking = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit code of the command."""
        watching = asyncio.ensure_future(self._watch_changes()) if self._changes is not None else None
        began = time.monotonic()
        await asyncio.gather(*map(self._keep, self.places))
        if watching is not None:
            watching.cancel()
        self._sum_up(time.monotonic() - began)
        if self._code == ENDED and self._cut_off and self._signal is not None:
            return 128 + self._signal
        return self._code

    def _sum_up(self, seconds: float) -> None:
        _log.info("stopped after %.3g s; %s", seconds, self._totals)
        if self._totals.failed:
            _log.warning(
                "what has failed comes again, or is a dead letter: see `onceward balance %s`",
                self._assignment.target,
            )

    # ── stopping ────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, number: int) -> None:
        """A signal: each goes one stage further."""
        self._signal = self._signal or number
        _log.info("heard %s", signal.Signals(number).name)
        self._enter(Stage(min(self.stage + 1, Stage.KILLING)))

    def _enter(self, stage: Stage) -> None:
        if stage <= self.stage:
            return
        self.stage = stage
        told = {
            Stage.DRAINING: "stopping: no new work is taken; a second signal cuts off what is in flight",
            Stage.HURRYING: "hurrying: what is in flight is cut off, and comes again when its lease has run out",
            Stage.KILLING: "killing the workers that are left",
        }
        _log.log(logging.INFO if stage is Stage.DRAINING else logging.WARNING, told[stage])
        self._waking.set()
        for place in self.places:
            if place.process is not None:
                self._tell(place.process)
        if stage < Stage.KILLING:
            patience = self._assignment.grace if stage is Stage.DRAINING else HURRY_PATIENCE
            asyncio.get_running_loop().call_later(patience, self._enter_if_needed, Stage(stage + 1))

    def _enter_if_needed(self, stage: Stage) -> None:
        if any(place.process is not None for place in self.places):
            self._enter(stage)

    def _tell(self, process: WorkerProcess) -> None:
        if self.stage is Stage.DRAINING:
            process.ask(DRAIN)
        elif self.stage is Stage.HURRYING:
            process.ask(HURRY)
        elif self.stage is Stage.KILLING:
            process.kill()

    def _fail(self, code: int) -> None:
        self._code = self._code or code
        self._enter(Stage.DRAINING)

    # ── one worker after the other ──────────────────────────────────────────────────────────────────────

    async def _keep(self, place: WorkerSlot) -> None:
        while self.stage is Stage.RUNNING:
            process = await WorkerProcess.start(
                msgspec.structs.replace(self._assignment, number=place.number)
            )
            place.process = process
            self._tell(process)  # if a signal came meanwhile
            _log.info("worker %d has started, pid %d", place.number, process.pid)
            code = await process.wait()
            place.process = None
            self._totals.add(process.status)
            if not await self._goes_on(place, process, code):
                return
            place.restarts += 1

    async def _goes_on(self, place: WorkerSlot, process: WorkerProcess, code: int) -> bool:
        """Whether another shall take its place; returns when it is time for that."""
        replacing, place.replacing = place.replacing, False
        if self.stage is not Stage.RUNNING:
            self._take_leave(place, process, code)
            return False
        if replacing:
            return True
        if code == MISUSED:
            return await self._refused(place, process)
        if code == UNREACHABLE:
            self._fail(FAILED)
            return False
        if code == ENDED and self._assignment.drain:
            _log.info("worker %d has found nothing more to do", place.number)
            return False
        place.problem = None if code in (ENDED, RECYCLED) else ending(code)
        if code == RECYCLED:
            _log.warning("worker %d had a stuck thread, and is started anew", place.number)
        elif code == ENDED:
            _log.warning("worker %d was stopped from outside, and is started anew", place.number)
        return await self._after_a_crash(place, process)

    def _take_leave(self, place: WorkerSlot, process: WorkerProcess, code: int) -> None:
        if code in (ENDED, RECYCLED) or (code == -signal.SIGTERM and process.status is None):
            _log.info("worker %d has ended", place.number)  # the last: before it could begin
            return
        if code == UNREACHABLE or code == MISUSED == self._code:
            return  # it, or the first of them, has told why
        self._cut_off = True
        how = "left work to its lease" if code == CUT_OFF else ending(code)
        _log.warning("worker %d %s", place.number, how)

    async def _after_a_crash(self, place: WorkerSlot, process: WorkerProcess) -> bool:
        if time.monotonic() - process.started_at >= STEADY:
            place.crashes = 0
        wait = RESTART.delay(place.crashes)
        place.crashes += 1
        if place.problem is None and place.crashes == 1:
            return True  # nothing is wrong with the next one
        if place.problem is not None:
            _log.error("worker %d %s; started anew in %.3g s", place.number, place.problem, wait)
        if self._assignment.drain and place.crashes >= GIVEN_UP:
            _log.critical("worker %d has crashed %d times in a row; giving up", place.number, place.crashes)
            self._fail(FAILED)
            return False
        await self._pause(wait)
        return self.stage is Stage.RUNNING

    async def _refused(self, place: WorkerSlot, process: WorkerProcess) -> bool:
        """It cannot work as it is configured, and neither could the next one."""
        place.problem = (process.status and process.status.refused) or ending(MISUSED)
        if self._code != MISUSED:  # once, for all of them
            _log.critical("%s", place.problem)
        if self._changes is None:
            self._fail(MISUSED)
            return False
        await self._pause(None)
        return self.stage is Stage.RUNNING

    async def _pause(self, seconds: float | None) -> None:
        """Until somebody stops the run or changes the code, or for so long."""
        self._waking.clear()
        if self.stage is Stage.RUNNING:
            await _within(seconds, self._waking)

    # ── new code ────────────────────────────────────────────────────────────────────────────────────────

    async def _watch_changes(self) -> None:
        assert self._changes is not None
        while True:
            changed = await self._changes.next()
            _log.info("%s has changed: the workers are started anew", changed)
            self._waking.set()
            await asyncio.gather(
                *(self._replace(place, place.process) for place in self.places if place.process is not None)
            )

    async def _replace(self, place: WorkerSlot, process: WorkerProcess) -> None:
        place.replacing = True
        for what in (DRAIN, HURRY):
            process.ask(what)
            if await process.ends_within(RELOAD_PATIENCE):
                return
        process.kill()


async def _within(seconds: float | None, event: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
