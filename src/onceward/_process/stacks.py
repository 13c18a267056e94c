"""Where code is right now, or was when it failed, as text for operators: the stack of a thread, of a coroutine with all
that it awaits, or of an error. It has lines of code, and no values."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

FRAMES: Final = 12
"""The innermost ones that are shown."""
LONGEST: Final = 3000
"""Characters."""
_OWN = str(Path(__file__).parents[1])
_THREADS = threading.__file__


def thread_stack(ident: int) -> str:
    """The stack of a thread, from the first call that is not of the engine; empty if it has ended."""
    frame = sys._current_frames().get(ident)
    return _format([(each, each.f_lineno) for each in _outwards(frame)][::-1])


def coroutine_stack(awaited: Any, thread: int) -> str:
    """The stack of a coroutine that is suspended; if it runs, or is not there yet, of the thread of its event loop."""
    if awaited is None or getattr(awaited, "cr_running", False):
        return thread_stack(thread)
    return _format([(each, each.f_lineno) for each in _inwards(awaited)])


def error_stack(error: BaseException | None) -> str | None:
    """Where the error, or the one that caused it, was raised outside of the engine; None if nowhere."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        frames = [(each, line) for each, line in traceback.walk_tb(error.__traceback__)]
        if any(not _is_own(frame) for frame, _ in frames):
            return _format(frames)
        seen.add(id(error))
        error = error.__cause__
    return None


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_OWN, _THREADS))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _inwards(awaited: Any) -> Iterator[FrameType]:
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                yield frame
                awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
                break
        else:
            return


def _format(frames: list[tuple[FrameType, int]]) -> str:
    """The innermost frames, with their lines, without those of the engine around the handler."""
    outer = 0
    while outer < len(frames) and _is_own(frames[outer][0]):
        outer += 1
    lines = traceback.StackSummary.extract(iter((frames[outer:] or frames)[-FRAMES:])).format()
    return "".join(lines)[-LONGEST:].rstrip()
