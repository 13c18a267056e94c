"""The worker processes, as their parent sees them: started, killed, started again, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from onceward.cli.demo.setup import Setup
from onceward.task.report import Report

PROGRAM = [sys.executable, "-m", "onceward.cli.demo.worker"]
STOP_PATIENCE = 15.0
"""Seconds a worker has to end what it has in flight."""
SEE_OFF_PATIENCE = 2.0
"""Seconds it has when nobody is interested in the outcome any more."""
LOG_LINES = 15
"""Shown of a worker that died by itself."""


class WorkerDied(Exception):
    """A worker ended although nobody asked it to. The message has the end of its log."""


class Worker:
    """One process, from its start to its end."""

    def __init__(self, setup: Setup, number: int, life: int) -> None:
        self.number = number
        self.life = life
        self.name = f"worker-{number}"
        self.identity = f"{self.name}.{life}"
        """Of this process: one that is started again has another, in the journal and on its log."""
        self._log = setup.log(self.identity)
        encoded_setup = msgspec.json.encode(setup).decode()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*PROGRAM, encoded_setup, self.identity],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # Ctrl-C is for the parent, which decides how to end
            )
        self.pid = self._process.pid

    def check(self) -> None:
        """Raises `WorkerDied` if it does not run any more."""
        if self._process.poll() is not None:
            raise self._died()

    def kill_if(self, right_moment: Callable[[], bool]) -> bool:
        """Kill it with -9 if, while it is frozen, this is the right moment; else let it go on."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._process.returncode = os.waitstatus_to_exitcode(status)
            raise self._died()
        if right_moment():
            self.kill()
            return True
        self._process.send_signal(signal.SIGCONT)
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def see_off(self) -> None:
        """Whatever it does, it has ended after this, and soon."""
        try:
            self._process.communicate(timeout=SEE_OFF_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def report(self) -> Report:
        """Wait for its end, and take what it reports."""
        try:
            told, _ = self._process.communicate(timeout=STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise WorkerDied(f"{self.name} did not stop within {STOP_PATIENCE:g} s") from None
        if self._process.returncode == -signal.SIGTERM:
            return Report()  # it had not begun yet
        if self._process.returncode != 0:
            raise self._died()
        return msgspec.json.decode(told, type=Report)

    def _died(self) -> WorkerDied:
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended by itself with exit code {code}"
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return WorkerDied("\n".join([f"{self.name} {how}; the end of its log:", *lines]))


class Crew:
    """All workers. None of them outlives the `with` block."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.ask_to_stop()
        for worker in self.workers:
            worker.see_off()

    def start(self) -> None:
        for number in range(1, self._setup.workers + 1):
            self.workers.append(Worker(self._setup, number, life=1))

    def check(self) -> None:
        for worker in self.workers:
            worker.check()

    def restart(self, dead: Worker) -> Worker:
        """A new process in the place of one that was killed."""
        again = Worker(self._setup, dead.number, dead.life + 1)
        self.workers[self.workers.index(dead)] = again
        return again

    def stop(self) -> list[Report]:
        """Ask all to stop, and wait for what they report."""
        for worker in self.workers:
            worker.ask_to_stop()
        return [worker.report() for worker in self.workers]
