"""A watchdog in each child: what takes too long is named, with the stack of whoever is in it."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

from onceward.testing.contract.frames import is_users

HUNG = "hung"
FALLBACK = 3.0
"""Seconds later a watchdog that needs no interpreter lock writes the stacks, in case this one gets none."""
PREPARING = 60.0
"""Seconds for what is the kit's own work: connecting, copying a database, reading it."""
_LOOK_EVERY = 0.05
_PROBE = f'  File "{Path(__file__).parent / "probe.py"}"'
"""Where a stack leaves the handler."""
BEGINNING = "_live_in_child"
"""The function that a child begins with."""


class Watchdog:
    """Ends the process when the work of the moment takes longer than `timeout`."""

    def __init__(self, tell: Callable[[tuple[str, Any]], None], timeout: float, stack_file: IO[str]) -> None:
        self._tell = tell
        self._timeout = timeout
        self._file = stack_file
        self._doing = "making ready"
        self.coroutine: Coroutine[Any, Any, Any] | None = None
        """Of the handler that runs now, in asyncio: what waits there is on no thread's stack."""

    def start(self) -> None:
        self.pet(self._doing, PREPARING)
        threading.Thread(target=self._watch, name="onceward-watchdog", daemon=True).start()

    def pet(self, doing: str, seconds: float | None = None) -> None:
        """A new piece of work begins."""
        self._doing = doing
        limit = self._timeout if seconds is None else seconds
        self._due = time.monotonic() + limit
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{doing}\n")
        self._file.flush()
        faulthandler.dump_traceback_later(limit + FALLBACK, file=self._file, exit=True)

    def _watch(self) -> None:
        while time.monotonic() < self._due:
            time.sleep(_LOOK_EVERY)
        self._tell((HUNG, (self._doing, self._stack())))
        os._exit(1)

    def _stack(self) -> str:
        if self.coroutine is not None:
            return "".join(_of_coroutine(self.coroutine))
        own = threading.get_ident()
        stacks = [list(_outwards(frame)) for thread, frame in sys._current_frames().items() if thread != own]
        told = [_of_thread(stack) for stack in stacks if any(map(is_users, stack))]
        return "\n".join(told or map(_of_thread, stacks))


def told_by_fallback(written: str) -> tuple[str, str] | None:
    """What was being done, and the stacks, if the fallback had to write them; innermost frames come first."""
    doing, _, stacks = written.partition("\n")
    if not stacks:
        return None
    threads = stacks.split("\n\n")
    inside = [thread.partition(_PROBE)[0] for thread in threads if _PROBE in thread]
    return doing, "\n\n".join(inside or threads)


def _of_thread(frames: list[FrameType]) -> str:
    """From the user's outermost frame on: what called it is the kit and the engine."""
    while len(frames) > 1 and not is_users(frames[-1]):
        frames.pop()
    summary = traceback.StackSummary.extract((each, each.f_lineno) for each in reversed(frames))
    return "".join(summary.format())


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Up to the child's beginning: beyond it is whoever asked for the verification."""
    while frame is not None and frame.f_code.co_name != BEGINNING:
        yield frame
        frame = frame.f_back


def _of_coroutine(coroutine: Any) -> Iterator[str]:
    """Down the chain of what awaits what."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield from traceback.StackSummary.extract([(frame, frame.f_lineno)]).format()
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
