"""The workers: started, killed, started again, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from onceward.demo.setup import Setup
from onceward.task.report import Report

# A child process, as its parent sees it: started, watched, stopped, and never left behind.


STOP_PATIENCE = 15.0
"""Seconds a process has to end what it has in flight."""
SEE_OFF_PATIENCE = 3.0
"""Seconds it has when nobody is interested in the outcome any more."""
LOG_LINES = 15
"""Shown of one that died by itself."""


class ChildDied(Exception):
    """A process ended although nobody asked it to. The message has the end of its log."""


class Child:
    """One process, from its start to its end. It is to be `attached`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                process_group=0,  # Ctrl-C is for the parent, which decides how to end
            )
        self.pid = self._process.pid

    def check(self) -> None:
        """Raises `ChildDied` if it does not run any more."""
        if self._process.poll() is not None:
            raise self.died()

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def result(self) -> bytes:
        """Wait for its end, and take what it wrote to stdout."""
        try:
            written, _ = self._process.communicate(timeout=STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ChildDied(f"{self.name} did not stop within {STOP_PATIENCE:g} s") from None
        if self._process.returncode not in (0, -signal.SIGTERM):  # the latter if it had not begun yet
            raise self.died()
        return written

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def see_off(self) -> None:
        """Whatever it does, it has ended after this, and soon."""
        try:
            self._process.wait(SEE_OFF_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.communicate()

    def died(self) -> ChildDied:
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended by itself with exit code {code}"
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return ChildDied("\n".join([f"{self.name} {how}; the end of its log:", *lines]))


def see_off_all(children: Sequence[Child]) -> None:
    """All are asked first, so that they end together."""
    for child in children:
        child.ask_to_stop()
    for child in children:
        child.see_off()


PROGRAM = [sys.executable, "-m", "onceward.demo.worker"]


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
