"""The child processes of a demo, and the crew of workers: start, watch, kill, restart, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Self, TypeVar

import msgspec

from onceward import Report
from onceward._files.private import create_file
from onceward.demo.setup import Setup

PROGRAM = [sys.executable, "-m", "onceward.demo.worker"]
STOP_PATIENCE = 15.0
"""Seconds for a process to finish its work in flight."""
END_PATIENCE = 3.0
"""Seconds for a process to exit when its result no longer matters."""
LOG_LINES = 15
"""Lines shown of the log of a process that died by itself."""


class ProcessDied(Exception):
    """A process ended without being asked to. The message has the end of its log."""


class DemoProcess:
    """One child process, from start to end. It must end with its parent: see `onceward._process.lifeline`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        create_file(log)
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                process_group=0,  # Ctrl-C reaches only the parent, which decides how to end
            )
        self.pid = self._process.pid

    def check(self) -> None:
        """Raise `ProcessDied` if it is no longer running."""
        if self._process.poll() is not None:
            raise self.died()

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def result(self) -> bytes:
        """Wait for its end and return what it wrote to stdout."""
        try:
            written, _ = self._process.communicate(timeout=STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProcessDied(f"{self.name} did not stop within {STOP_PATIENCE:g} s") from None
        if self._process.returncode not in (0, -signal.SIGTERM):  # the latter if it had not started yet
            raise self.died()
        return written

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        """Wait briefly for its end, then kill it."""
        try:
            self._process.wait(END_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.communicate()

    def died(self) -> ProcessDied:
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended by itself with exit code {code}"
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return ProcessDied("\n".join([f"{self.name} {how}; the end of its log:", *lines]))


P = TypeVar("P", bound=DemoProcess)


class ProcessGroup(Generic[P]):
    """Child processes, none of which outlives the `with` block."""

    def __init__(self) -> None:
        self.children: list[P] = []

    def check(self) -> None:
        """Raise `ProcessDied` if one of them is no longer running."""
        for child in self.children:
            child.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:  # ask all first, so they end at the same time
            child.ask_to_stop()
        for child in self.children:
            child.end()


class DemoWorker(DemoProcess):
    """One worker process. Its successor has another identity."""

    def __init__(self, setup: Setup, boundary: str, number: int, life: int) -> None:
        self.number = number
        self.life = life
        self.identity = f"worker-{number}.{life}"
        """Its name in the journal, the ledger and its log file."""
        encoded_setup = msgspec.json.encode(setup).decode()
        command = [*PROGRAM, encoded_setup, boundary, self.identity]
        super().__init__(f"worker-{number}", command, setup.log(self.identity))

    def kill_if(self, right_moment: Callable[[], bool]) -> bool:
        """Freeze it, and kill it with -9 if this is the right moment; otherwise let it continue."""
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
        """Wait for its end and return its report."""
        written = self.result()
        return msgspec.json.decode(written, type=Report) if written else Report()


class Crew(ProcessGroup[DemoWorker]):
    """All workers, on one boundary."""

    def __init__(self, setup: Setup, boundary: str) -> None:
        super().__init__()
        self._setup = setup
        self._boundary = boundary

    def start(self) -> None:
        for number in range(1, self._setup.workers + 1):
            self.children.append(DemoWorker(self._setup, self._boundary, number, life=1))

    def restart(self, dead: DemoWorker) -> DemoWorker:
        """Start a new process in place of one that was killed."""
        again = DemoWorker(self._setup, self._boundary, dead.number, dead.life + 1)
        self.children[self.children.index(dead)] = again
        return again

    def stop(self) -> list[Report]:
        """Ask all to stop and wait for their reports."""
        for worker in self.children:
            worker.ask_to_stop()
        return [worker.report() for worker in self.children]
