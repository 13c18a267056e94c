"""A child process, as its parent sees it: started, watched, stopped, and never left behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

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
