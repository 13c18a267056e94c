"""End a worker process from outside its run, for operators on its machine. Its supervisor starts another one.

A pid is used again after its process has ended. So the process is held by a descriptor first, then it is looked at, and
what is signaled is what the descriptor holds.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from onceward.errors import ConfigurationError
from onceward.run.protocol import Assignment
from onceward.run.scoreboard import Scoreboard
from onceward.run.worker_process import PROGRAM, name_of

KILLED_WITHIN = 10.0
"""Seconds until a killed process is gone, unless its machine hangs."""


class ForeignWorker:
    """A worker process of any run on this machine. Raises ConfigurationError if there is no such process."""

    def __init__(self, process: str) -> None:
        """`process` is a pid, or a pid and the name of the process: `4711.5f0c…`."""
        pid, _, name = process.partition(".")
        if not (pid.isascii() and pid.isdigit() and 0 < int(pid) < 1 << 31):
            raise ConfigurationError(f"name a process by its pid, as in 4711, not {process!r}")
        if not hasattr(os, "pidfd_open"):
            raise ConfigurationError(
                f"this needs Linux; use `kill {pid}`, and `kill -9 {pid}` if it does not end"
            )
        self.pid = int(pid)
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except OSError as error:
            raise ConfigurationError(f"there is no process {pid}: {error.strerror}") from None
        try:
            self.assignment = self._read(name)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _read(self, name: str) -> Assignment:
        try:
            arguments = Path(f"/proc/{self.pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            arguments = []
        if self.ends_within(0.0):  # what was read may be of another process
            raise ConfigurationError(f"process {self.pid} has ended")
        if PROGRAM[-1] not in arguments:
            raise ConfigurationError(f"process {self.pid} is not a worker of `onceward run`")
        try:
            given, _, _, scoreboard = arguments[arguments.index(PROGRAM[-1]) + 1 :][:4]
            found = msgspec.json.decode(given, type=Assignment)
        except (msgspec.MsgspecError, ValueError):
            raise ConfigurationError(f"process {self.pid} is a worker of another release") from None
        if name and name != name_of(found):
            raise ConfigurationError(
                f"process {self.pid} is another worker now: the one that you name has ended, and its pid is used again"
            )
        self._scoreboard = Path(f"/proc/{self.pid}/fd/{scoreboard}")
        return found

    def end(self, grace: float) -> bool:
        """Ask it to finish what is in flight, and kill it after so many seconds. Returns whether it had to be killed.

        Raises PermissionError if it belongs to another user, and TimeoutError if even that does not end it.
        """
        self._send(0)  # only checks whether this user may
        self._tell_supervisor()
        self._send(signal.SIGTERM)
        if self.ends_within(grace):
            return False
        self._send(signal.SIGKILL)
        if not self.ends_within(KILLED_WITHIN):
            raise TimeoutError(f"process {self.pid} was killed, and is still there")
        return True

    def _tell_supervisor(self) -> None:
        """Leave a mark in the memory that it shares with its supervisor, which would take a kill for a crash."""
        try:
            with self._scoreboard.open("r+b") as file:
                if not self.ends_within(0.0):  # the file may be of another process
                    Scoreboard(file.fileno()).note_operator()
        except (OSError, ValueError):  # closed, or of another release: ending it matters more
            return

    def _send(self, number: int) -> None:
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return  # it has ended

    def ends_within(self, seconds: float) -> bool:
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
