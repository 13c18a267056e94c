"""A process that user code forked, and that comes back into ours.

`os.fork` copies the whole program. If the code behind it returns or raises in the child, the child would go on as a
second worker: it would commit, acknowledge, and close the connections of its parent. So it ends there. A child that
ends itself, with `os._exit`, an exec or as `multiprocessing` does, never gets here, and may well run tasks of its own.
"""

from __future__ import annotations

import os
import sys
from textwrap import indent
from types import TracebackType
from typing import NoReturn

from onceward._text import printable, printable_lines


class Forks:
    """`generation` is the number of forks between this process and the first that imported this module."""

    generation = 0

    def count(self) -> None:
        self.generation += 1


forks = Forks()
os.register_at_fork(after_in_child=forks.count)


class UserCode:
    """A block around a call of user code: a forked child does not leave it."""

    __slots__ = ("_generation", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._generation = forks.generation

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if forks.generation != self._generation:
            end_child(self._what, error)


def end_child(what: str, error: BaseException | None = None) -> NoReturn:
    """End this process, which `what` forked: with the code of a SystemExit, 1 after any other error, otherwise 0."""
    code = 0
    try:
        message = f"onceward: process {os.getpid()}, forked in {what}, ends here: it must not go on as a second worker"
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code, message = error.code or 0, ""
        elif isinstance(error, SystemExit):
            code, message = 1, printable(str(error.code))
        elif error is not None:
            from onceward.telemetry.logs import BELOW
            from onceward.telemetry.redaction import format_error

            trace = indent(printable_lines(format_error(error)), BELOW)
            code, message = 1, f"{trace}\n{message}"
        else:
            message += "; end it with os._exit"
        if message:
            sys.stderr.write(f"{message}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
