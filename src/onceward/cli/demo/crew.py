"""The workers: started, killed, started again, stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from onceward.cli.demo.processes import Child, see_off_all
from onceward.cli.demo.setup import Setup
from onceward.task.report import Report

PROGRAM = [sys.executable, "-m", "onceward.cli.demo.worker"]


class Worker(Child):
    """One process. One that is started again in its place has another identity."""

    def __init__(self, setup: Setup, boundary: str, number: int, life: int) -> None:
        self.number = number
        self.life = life
        self.identity = f"worker-{number}.{life}"
        """In the journal, in the ledger and on its log."""
        encoded_setup = msgspec.json.encode(setup).decode()
        command = [*PROGRAM, encoded_setup, boundary, self.identity]
        super().__init__(f"worker-{number}", command, setup.log(self.identity))

    def kill_if(self, right_moment: Callable[[], bool]) -> bool:
        """Kill it with -9 if, while it is frozen, this is the right moment; else let it go on."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._process.returncode = os.waitstatus_to_exitcode(status)
            raise self.died()
        if right_moment():
            self.kill()
            return True
        self._process.send_signal(signal.SIGCONT)
        return False

    def report(self) -> Report:
        """Wait for its end, and take what it reports."""
        told = self.result()
        return msgspec.json.decode(told, type=Report) if told else Report()


class Crew:
    """All workers, on one boundary. None of them outlives the `with` block."""

    def __init__(self, setup: Setup, boundary: str) -> None:
        self._setup = setup
        self._boundary = boundary
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        see_off_all(self.workers)

    def start(self) -> None:
        for number in range(1, self._setup.workers + 1):
            self.workers.append(Worker(self._setup, self._boundary, number, life=1))

    def check(self) -> None:
        for worker in self.workers:
            worker.check()

    def restart(self, dead: Worker) -> Worker:
        """A new process in the place of one that was killed."""
        again = Worker(self._setup, self._boundary, dead.number, dead.life + 1)
        self.workers[self.workers.index(dead)] = again
        return again

    def stop(self) -> list[Report]:
        """Ask all to stop, and wait for what they report."""
        for worker in self.workers:
            worker.ask_to_stop()
        return [worker.report() for worker in self.workers]
