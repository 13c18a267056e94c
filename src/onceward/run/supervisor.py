"""The supervisor: starts the workers, restarts those that exit, and shuts them down in order.

first SIGTERM or Ctrl-C      drain   no new fetch; work in flight finishes and is settled
second, or after `grace`     hurry   work in flight is cut off, and given back when the worker has ended
third, or if that hangs      kill
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

import msgspec

from onceward.backoff import Backoff
from onceward.run.leftovers import ASKED, end_leftovers
from onceward.run.protocol import (
    CUT_OFF,
    DRAIN,
    ENDED,
    FAILED,
    HURRY,
    MISUSED,
    RECYCLED,
    UNDELIVERED,
    UNREACHABLE,
    Assignment,
)
from onceward.run.scoreboard import Score
from onceward.run.totals import Totals
from onceward.run.worker_process import StuckAttempt, WorkerProcess
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.run"))

RESTART = Backoff(0.5, cap=30.0)
"""Delay before a crashed worker is restarted."""
STEADY = 30.0
"""Seconds after which a worker counts as steady: its next crash counts as the first."""
MAX_CRASHES = 10
"""Crashes in a row after which a run with `--drain` gives up."""
HURRY_PATIENCE = 5.0
"""Seconds until a worker that was asked to hurry is killed. It exits by itself before that."""
STUCK_KEPT = 5
"""Stuck attempts of ended processes that each place remembers."""
RELOAD_PATIENCE = 3.0
"""Seconds for work in flight to finish when the code has changed."""
END_PATIENCE = 5.0
"""Seconds for the other work in flight to finish when an operator ends a process."""
NOTED_WITHIN = 10.0
"""Seconds that the successor of an ended process waits for what has to be noted first."""
LAST_NOTE = 1.0
"""The same while the run stops."""


class RunStage(IntEnum):
    RUNNING = 0
    DRAINING = 1
    HURRYING = 2
    KILLING = 3


class EndAnswer(Enum):
    """What became of the wish to end a process."""

    BEGUN = "begun"
    UNDER_WAY = "under way"
    """It ends already, for another operator or new code."""
    GONE = "gone"
    """It has ended, and another one may have its place: nothing was done."""
    STOPPING = "stopping"
    """The whole run stops, and ends all its processes in time."""


class ProcessEnd(NamedTuple):
    """An operator ends a process."""

    operator: str
    reason: str
    at: float
    """Since 1970."""


class Changes(Protocol):
    """Waits for a change of the code and names a changed file."""

    async def next(self) -> str: ...


class Release(Protocol):
    """Gives back what a dead process held; see `onceward.run.release`."""

    async def __call__(self, worker: str, owner: str, stopping: asyncio.Event) -> None: ...


class WorkerSlot:
    """The place of one worker process and its successors."""

    def __init__(self, number: int, only: tuple[str, ...] = (), *, separate: bool = False) -> None:
        self.number = number
        self.only = only
        """The consumers that it runs; empty for all."""
        self.separate = separate
        """Whether it was added for a consumer that may have crashed a worker it shared with others."""
        self.process: WorkerProcess | None = None
        """None before the first, between two, and after the last."""
        self.obsolete = False
        """Whether its consumer is back in the worker that it shared with others."""
        self.restarts = 0
        self.crashes = 0
        """In a row."""
        self.problem: str | None = None
        """How the last one failed, if it did."""
        self.replacing = False
        """Whether it was asked to make room for another one: for new code, or because an operator ends it."""
        self.ending: ProcessEnd | None = None
        """Who ends its process."""
        self.noting: asyncio.Future[None] | None = None
        """What has to be noted before its next process starts."""
        self.past: dict[str, Score] = {}
        """What its earlier processes have done, by consumer."""
        self.were_stuck: list[StuckAttempt] = []
        """The last attempts on which its earlier processes gave up."""

    def note_end(self, process: WorkerProcess) -> None:
        for name, each in process.scores().items():
            self.past[name] = each.after(self.past.get(name))
        earlier = [each for each in self.were_stuck if (each.consumer, each.flight.id) not in process.stuck]
        self.were_stuck = [*earlier, *process.stuck.values()][-STUCK_KEPT:]


class Supervisor:
    """`await run()` in an event loop; call `on_signal` for each signal."""

    def __init__(
        self,
        assignment: Assignment,
        processes: int,
        changes: Changes | None = None,
        release: Release | None = None,
    ) -> None:
        self.places = [WorkerSlot(number, assignment.only) for number in range(1, processes + 1)]
        self._last_number = processes
        self._keeping: set[asyncio.Future[None]] = set()
        self.stage = RunStage.RUNNING
        self._assignment = assignment
        self._changes = changes
        self._release = release
        self._signal: int | None = None
        self._code = ENDED
        self._cut_off = False
        self.totals = Totals()
        """Of all processes that have ended."""
        self._waking = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ends: set[asyncio.Future[None]] = set()

    async def run(self) -> int:
        """Run until all workers have ended. Returns the exit code of the command."""
        watching = asyncio.ensure_future(self._watch_changes()) if self._changes is not None else None
        began = time.monotonic()
        for place in self.places:
            self._add(place)
        while self._keeping:
            ended, _ = await asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
            self._keeping -= ended
            for each in ended:
                each.result()
        if watching is not None:
            watching.cancel()
        self._log_summary(time.monotonic() - began)
        if self._code == ENDED and self._cut_off and self._signal is not None:
            return 128 + self._signal
        return self._code

    def _log_summary(self, seconds: float) -> None:
        _log.info("stopped after %.1f s; %s", seconds, self.totals)
        if self.totals.failed:
            _log.warning(
                "to see what became of failed messages, run `onceward balance %s`",
                self._assignment.target,
            )

    # ── stopping ────────────────────────────────────────────────────────────────────────────────────────

    def on_signal(self, number: int) -> None:
        """Enter the next stage."""
        self._signal = self._signal or number
        _log.info("received %s", signal.Signals(number).name)
        self._enter(RunStage(min(self.stage + 1, RunStage.KILLING)))

    def _enter(self, stage: RunStage) -> None:
        if stage <= self.stage:
            return
        self.stage = stage
        self._stopping.set()
        messages = {
            RunStage.DRAINING: "stopping: no new work is fetched; a second signal cuts off work in flight",
            RunStage.HURRYING: "hurrying: work in flight is cut off and will be redelivered",
            RunStage.KILLING: "killing the remaining workers",
        }
        _log.log(logging.INFO if stage is RunStage.DRAINING else logging.WARNING, messages[stage])
        self._waking.set()
        for place in self.places:
            if place.process is not None:
                self._notify(place.process)
        if stage < RunStage.KILLING:
            patience = self._assignment.grace if stage is RunStage.DRAINING else HURRY_PATIENCE
            asyncio.get_running_loop().call_later(patience, self._enter_if_needed, RunStage(stage + 1))

    def _enter_if_needed(self, stage: RunStage) -> None:
        if any(place.process is not None for place in self.places):
            self._enter(stage)

    def _notify(self, process: WorkerProcess) -> None:
        if self.stage is RunStage.DRAINING:
            process.ask(DRAIN)
        elif self.stage is RunStage.HURRYING:
            process.ask(HURRY)
        elif self.stage is RunStage.KILLING:
            process.kill()

    def _fail(self, code: int) -> None:
        self._code = self._code or code
        self._enter(RunStage.DRAINING)

    # ── one worker after the other ──────────────────────────────────────────────────────────────────────

    def _add(self, place: WorkerSlot, wait: float = 0.0) -> None:
        if place not in self.places:
            self.places.append(place)
        self._keeping.add(asyncio.ensure_future(self._keep(place, wait)))

    async def _keep(self, place: WorkerSlot, wait: float) -> None:
        if wait:
            await self._pause(wait)
        while self.stage is RunStage.RUNNING and not place.obsolete:
            owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"
            try:
                process = await WorkerProcess.start(
                    msgspec.structs.replace(
                        self._assignment, number=place.number, only=place.only, owner=owner
                    )
                )
            except OSError as error:  # out of files, processes or memory: this may pass
                place.problem = f"could not be started: {error}"
                if await self._after_a_failure(place):
                    continue
                break
            place.process = process
            self._notify(process)  # in case a signal arrived meanwhile
            _log.info("worker %d started, pid %d", place.number, process.pid)
            code = await process.wait()
            place.process = None
            place.note_end(process)
            self.totals.add(process.scores())
            if code not in (ENDED, UNDELIVERED):
                await self._end_leftovers(place, process)
                if self._release is not None:
                    await self._release(f"worker {place.number}", owner, self._stopping)
            await self._conclude_ending(place)
            if not await self._should_restart(place, process, code):
                break
            place.restarts += 1
        if place.separate:
            self.places.remove(place)

    async def _end_leftovers(self, place: WorkerSlot, process: WorkerProcess) -> None:
        patience = ASKED if self.stage is RunStage.RUNNING else 0.0
        if await end_leftovers(process.pid, patience):
            _log.warning(
                "worker %d left processes that its handlers had started; they were ended", place.number
            )

    async def _should_restart(self, place: WorkerSlot, process: WorkerProcess, code: int) -> bool:
        """Whether to start a successor; returns when it is time to start it."""
        replacing, place.replacing = place.replacing, False
        if self.stage is not RunStage.RUNNING:
            self._log_exit(place, process, code)
            return False
        if replacing:
            return True
        if process.is_ended_by_operator:
            _log.warning("worker %d was ended with `onceward end-worker`; restarting", place.number)
            return True
        if code == MISUSED:
            return await self._handle_refusal(place, process)
        if code == UNREACHABLE:
            self._fail(FAILED)
            return False
        if code == UNDELIVERED:
            self._code = self._code or FAILED  # the others finish what they can
            _log.info("worker %d: nothing else is left, exiting", place.number)
            return False
        if code == ENDED and self._assignment.drain:
            _log.info("worker %d: source is empty, exiting", place.number)
            return False
        place.problem = None if code in (ENDED, RECYCLED) else process.ending
        if code == RECYCLED:
            _log.warning("worker %d had a stuck thread; restarting", place.number)
        elif code == ENDED:
            _log.warning("worker %d was stopped from outside; restarting", place.number)
        return await self._after_a_crash(place, process)

    def _log_exit(self, place: WorkerSlot, process: WorkerProcess, code: int) -> None:
        if code in (ENDED, RECYCLED, UNDELIVERED) or (code == -signal.SIGTERM and process.status is None):
            _log.info("worker %d exited", place.number)  # the SIGTERM: before it could begin
            return
        if code == UNREACHABLE or code == MISUSED == self._code:
            return  # it, or the first of them, has logged why
        self._cut_off = True
        how = "left work in flight, which will be redelivered" if code == CUT_OFF else process.ending
        _log.warning("worker %d %s", place.number, how)

    async def _after_a_crash(self, place: WorkerSlot, process: WorkerProcess) -> bool:
        if time.monotonic() - process.started_at >= STEADY:
            place.crashes = 0
        return True if self._separate(place, process) else await self._after_a_failure(place)

    async def _after_a_failure(self, place: WorkerSlot) -> bool:
        """Whether to start a successor; returns when it is time to start it, later after each failure in a row."""
        wait = RESTART.delay(place.crashes)
        place.crashes += 1
        if place.problem is None and place.crashes == 1:
            return True  # the next one may start at once
        if place.problem is not None:
            _log.error("worker %d %s; restarting in %.3g s", place.number, place.problem, wait)
        if self._assignment.drain and place.crashes >= MAX_CRASHES:
            _log.critical("worker %d crashed %d times in a row; giving up", place.number, place.crashes)
            self._code = self._code or FAILED  # the others finish what they can
            return False
        await self._pause(wait)
        return self.stage is RunStage.RUNNING

    def _separate(self, place: WorkerSlot, process: WorkerProcess) -> bool:
        """Move the consumers that may have ended the process to workers of their own; the others may go on at once.

        If several had work in flight, any of them may be to blame, or none, as after a kill from outside. They are
        separated only if the worker crashes again; then only the one to blame crashes further.
        """
        running, suspects = list(process.scores()), process.suspects()
        if len(running) == 1 or not suspects or (len(suspects) > 1 and not place.crashes):
            return False
        others = tuple(name for name in running if name not in suspects)
        is_certain = len(suspects) == 1
        wait = RESTART.delay(0) if is_certain else 0.0
        if not others:
            others = (suspects.pop(),)
        for name in suspects:
            self._last_number += 1
            separate = WorkerSlot(self._last_number, (name,), separate=True)
            separate.crashes, separate.problem = int(is_certain), place.problem
            _log.error(
                "worker %d %s; %s may be the cause and continues alone in worker %d, in %.3g s",
                place.number, place.problem or "had a stuck thread", name, self._last_number, wait,
            )  # fmt: skip
            self._add(separate, wait)
        place.only, place.crashes = others, 0
        return True

    async def _handle_refusal(self, place: WorkerSlot, process: WorkerProcess) -> bool:
        """The worker refused its configuration, and so would the next one."""
        place.problem = (process.status and process.status.refused) or process.ending
        if self._code != MISUSED:  # log it once for all of them
            _log.critical("%s", place.problem)
        if self._changes is None:
            self._fail(MISUSED)
            return False
        await self._pause(None)
        return self.stage is RunStage.RUNNING

    async def _pause(self, seconds: float | None) -> None:
        """Wait until the run is stopped, the code changes, or the time is up."""
        self._waking.clear()
        if self.stage is RunStage.RUNNING:
            await _within(seconds, self._waking)

    # ── new code ────────────────────────────────────────────────────────────────────────────────────────

    async def _watch_changes(self) -> None:
        assert self._changes is not None
        while True:
            changed = await self._changes.next()
            _log.info("%s changed; restarting the workers", changed)
            for place in self.places:  # new code may have other consumers
                place.only, place.obsolete = self._assignment.only, place.separate
            self._waking.set()
            await asyncio.gather(
                *(self._replace(place, place.process) for place in self.places if place.process is not None)
            )

    async def _replace(
        self, place: WorkerSlot, process: WorkerProcess, patience: float = RELOAD_PATIENCE
    ) -> None:
        place.replacing = True
        for what in (DRAIN, HURRY):
            process.ask(what)
            if await process.ends_within(patience):
                return
        process.kill()

    # ── what an operator ends ───────────────────────────────────────────────────────────────────────────

    def end_worker(
        self, number: int, process: str, ending: ProcessEnd, noting: Callable[[], Coroutine[None, None, None]]
    ) -> EndAnswer:
        """End one process, by the number of its worker and its own name, and start another in its place.

        A name is never used again, so no other process can be meant. It gets nothing new, and a few seconds for what is
        in flight; then that is cut off; then it is killed. `noting` runs meanwhile, and the successor waits for it: an
        audit, or a pause, that a handler of this process keeps from being written.
        """
        place = next((each for each in self.places if each.number == number), None)
        found = None if place is None else place.process
        if place is None or found is None or found.name != process or found.has_ended:
            return EndAnswer.GONE
        if self.stage is not RunStage.RUNNING:
            return EndAnswer.STOPPING
        if place.replacing:
            return EndAnswer.UNDER_WAY
        _log.warning(
            "worker %d (pid %d) is ended by %s: %s", number, found.pid, ending.operator, ending.reason
        )
        place.replacing, place.ending = True, ending
        place.noting = asyncio.ensure_future(noting())
        doing = asyncio.ensure_future(self._replace(place, found, END_PATIENCE))
        self._ends.add(doing)
        doing.add_done_callback(self._ends.discard)
        return EndAnswer.BEGUN

    async def _conclude_ending(self, place: WorkerSlot) -> None:
        noting, place.noting, place.ending = place.noting, None, None
        if noting is None:
            return
        patience = NOTED_WITHIN if self.stage is RunStage.RUNNING else LAST_NOTE
        await asyncio.wait([noting], timeout=patience)
        if not noting.done() or noting.exception() is not None:
            _log.error("worker %d was ended, and that could not be noted in time", place.number)


async def _within(seconds: float | None, event: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
