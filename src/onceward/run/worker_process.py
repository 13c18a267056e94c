"""A worker process, as the supervisor sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

import msgspec

from onceward.run.protocol import FAILED, Assignment, Flight, WorkerStatus
from onceward.run.scoreboard import Score, Scoreboard, new_file

PROGRAM = (sys.executable, "-m", "onceward.run.worker")
LONGEST_LINE = 1 << 20
LAST_WORDS = 1.0
"""Seconds to wait for the last status of a worker that crashed: a process it started may keep the pipe open."""


class StuckAttempt(NamedTuple):
    """An attempt that a worker has given up on, as it was last seen."""

    consumer: str
    pid: int
    at: float
    """When, in seconds since 1970."""
    seen_at: float
    flight: Flight


class WorkerProcess:
    """Its own interpreter in its own process group: Ctrl-C reaches only the supervisor, which decides."""

    def __init__(
        self, process: asyncio.subprocess.Process, control: int, scoreboard: Scoreboard, name: str = ""
    ) -> None:
        self.pid = process.pid
        self.name = name
        """Of this process alone: a pid is used again."""
        self.started_at = time.monotonic()
        self.heard_at = self.started_at
        self.status: WorkerStatus | None = None
        self.ending = ""
        """How it ended, in words."""
        self.stuck: dict[tuple[str, str], StuckAttempt] = {}
        """By consumer and message. Soon after the first the process ends: what it said is all that is known then."""
        self._process = process
        self._scoreboard = scoreboard
        self._control: int | None = control

    @classmethod
    async def start(cls, assignment: Assignment) -> Self:
        """Raises OSError if there are not enough files, processes or memory for it."""
        with ExitStack() as handed_over, ExitStack() as kept:
            control_end, control = _pipe(handed_over, kept)
            reports_end, reports = _pipe(handed_over, kept, reading=False)
            scoreboard = new_file()
            handed_over.callback(os.close, scoreboard)
            shared = Scoreboard(scoreboard)
            process = await asyncio.create_subprocess_exec(
                *PROGRAM,
                msgspec.json.encode(assignment).decode(),
                str(control_end),
                str(reports_end),
                str(scoreboard),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(control_end, reports_end, scoreboard),
                process_group=0,
            )
            kept.pop_all()
        worker = cls(process, control, shared, name_of(assignment))
        worker._reading = asyncio.ensure_future(worker._read(reports))
        return worker

    _reading: asyncio.Future[None]

    async def _read(self, reports: int) -> None:
        lines = asyncio.StreamReader(LONGEST_LINE)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(reports, "rb", buffering=0)
        )
        try:
            async for line in lines:
                self.heard_at = time.monotonic()
                self.status = msgspec.json.decode(line, type=WorkerStatus)
                self._note_stuck(self.status)
                if self.status.exit_code is not None:
                    break  # a process that it started may keep the pipe open
        finally:
            transport.close()

    def _note_stuck(self, status: WorkerStatus) -> None:
        for each in status.consumers:
            for flight in each.flights:
                if flight.stuck:
                    found = StuckAttempt(each.name, self.pid, time.time(), self.heard_at, flight)
                    self.stuck[each.name, flight.id] = found

    def scores(self) -> dict[str, Score]:
        """What each of its consumers has done so far, also if it is dead."""
        return self._scoreboard.scores([each.name for each in self.status.consumers] if self.status else [])

    def suspects(self) -> list[str]:
        """The consumers that may have ended it: those that failed or are stuck, otherwise those with work in flight."""
        reported = self.status.consumers if self.status else []
        were_stuck = {
            consumer for consumer, _ in self.stuck
        }  # its last report has no more of it: the message failed
        certain = [each.name for each in reported if each.broken or each.stuck or each.name in were_stuck]
        return certain or [name for name, score in self.scores().items() if score.in_flight]

    def ask(self, what: bytes) -> None:
        if self._control is not None:
            with suppress(BrokenPipeError):
                os.write(self._control, what)

    @property
    def is_ended_by_operator(self) -> bool:
        """Whether it ends, or has ended, because of `onceward end-worker`."""
        return self._scoreboard.is_ended_by_operator

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Return how it ended, once all its reports have been read: the exit code that it announced, a signal as a
        negative number, otherwise `FAILED`."""
        code = await self._process.wait()
        if self._control is not None:
            os.close(self._control)
            self._control = None
        await asyncio.wait([self._reading], timeout=LAST_WORDS)
        self._reading.cancel()
        self.ending = _ending(code)
        announced = self.status.exit_code if self.status is not None else None
        return code if code < 0 or code == announced else FAILED


def name_of(assignment: Assignment) -> str:
    """The name of the process that has it: the end of its owner's, which is made by chance for each process."""
    return (assignment.owner or "").rpartition("-")[2]


def _pipe(handed_over: ExitStack, kept: ExitStack, *, reading: bool = True) -> tuple[int, int]:
    """Open a pipe; return the worker's end, which reads or writes, and the supervisor's."""
    end, own = os.pipe() if reading else reversed(os.pipe())
    handed_over.callback(os.close, end)
    kept.callback(os.close, own)
    return end, own


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
