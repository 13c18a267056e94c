"""Commands as processes of their own, of which none outlives its test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Start = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def processes() -> Iterator[Start]:
    """Yields `subprocess.Popen` for text; what still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


class LoggedProcess:
    """A command that logs JSON, and what it has logged so far."""

    def __init__(self, command: Sequence[str], log_file: Path, *, stdout: Any = None, **options: Any) -> None:
        self._log_file = log_file
        with log_file.open("w") as log:
            self.process = subprocess.Popen(command, stdout=stdout or log, stderr=log, text=True, **options)

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines()]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
