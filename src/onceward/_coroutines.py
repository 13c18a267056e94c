"""Coroutines that a handler creates and never awaits: their code has not run, so the attempt must not succeed.

CPython reports such a coroutine to `warnings._warn_unawaited_coroutine` when it is dropped. That happens where the last
reference goes away: on the line that creates it, or when the handler's frame ends, which is before the commit. So the
context in which it is dropped tells the attempt. The garbage collector drops things anywhere, and a log handler may let
go of an older traceback: about what these drop there is only Python's own warning.
"""

from __future__ import annotations

import gc
import sys
import warnings
from contextvars import ContextVar
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

from onceward.task.exceptions import unawaited_error
from onceward.telemetry.context import current_work

_PACKAGE = str(Path(__file__).parent)
_seen: ContextVar[list[str] | None] = ContextVar("onceward_unawaited", default=None)
"""The unawaited coroutines of the handler that runs here, inside a session."""
_collecting: int | None = None
"""The thread in which the garbage collector runs."""
_warn: Any = None
"""Python's own function, once ours is in its place."""


def watch_coroutines() -> None:
    """Notice coroutines that are never awaited, in this process from now on."""
    global _warn
    if _warn is None and hasattr(warnings, "_warn_unawaited_coroutine"):
        _warn = warnings._warn_unawaited_coroutine
        warnings._warn_unawaited_coroutine = _dropped
        gc.callbacks.append(_collect)


class all_awaited:
    """Raise `UnawaitedError` at the end of the block if it created a coroutine and did not await it. Used as a
    function; a generator would take three times as long."""

    __slots__ = ("_list", "_token")

    def __enter__(self) -> None:
        if _warn is None:
            watch_coroutines()
        self._list: list[str] = []
        self._token = _seen.set(self._list)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _seen.reset(self._token)
        if error is None and self._list:
            raise unawaited_error(self._list)


def _collect(phase: str, _: dict[str, int]) -> None:
    global _collecting
    _collecting = get_ident() if phase == "start" else None


def _dropped(coroutine: Any) -> None:
    """Called by CPython when it finalizes a coroutine that has not started."""
    frame = sys._getframe().f_back
    if _collecting != get_ident() and not _is_logging(frame):
        seen = _seen.get()
        work: Any = current_work.get()
        if seen is not None:
            seen.append(_describe(coroutine, frame))
        elif getattr(work, "unawaited", None) is not None:
            work.unawaited = [*work.unawaited, _describe(coroutine, frame)]
    _warn(coroutine)


def _is_logging(frame: FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "logging"


def _describe(coroutine: Any, frame: FrameType | None) -> str:
    """The function, and the line that dropped it; if that is not the user's, the line where the function is defined."""
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    if frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        return f"{name}(…) at {frame.f_code.co_filename}:{frame.f_lineno}"
    code = coroutine.cr_code
    if code.co_filename.startswith(_PACKAGE):
        return f"{name}(…)"
    return f"{name}(…), defined at {code.co_filename}:{code.co_firstlineno},"
