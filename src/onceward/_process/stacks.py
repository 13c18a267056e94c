"""Where code is right now: the stack of a thread, or of a coroutine with all that it awaits, as text for operators."""

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
    return _format(list(_outwards(frame))[::-1])


def coroutine_stack(awaited: Any, thread: int) -> str:
    """The stack of a coroutine that is suspended; if it runs, of the thread of its event loop."""
    if getattr(awaited, "cr_running", False):
        return thread_stack(thread)
    return _format(list(_inwards(awaited)))


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


def _format(frames: list[FrameType]) -> str:
    """The innermost frames, without those of the engine around the handler."""
    outer = 0
    while outer < len(frames) and frames[outer].f_code.co_filename.startswith((_OWN, _THREADS)):
        outer += 1
    chosen = (frames[outer:] or frames)[-FRAMES:]
    lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in chosen).format()
    return "".join(lines)[-LONGEST:].rstrip()
