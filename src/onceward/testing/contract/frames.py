"""Whose code a frame is: the user's, or that of Python, of installed packages, or of this package."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import onceward
from onceward.task.io_guard import NOT_THE_TASKS_DOING

_OURS = str(Path(onceward.__file__).resolve().parent)
_INSTALLED = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_packages: set[str] = set()
"""Top-level packages that are the user's, wherever they are installed."""


def claim(module: str) -> None:
    """Whatever is in the package of this module is the user's."""
    package = module.partition(".")[0]
    if package != "onceward":
        _packages.add(package)


def is_users(frame: FrameType) -> bool:
    return module_of(frame).partition(".")[0] in _packages or _is_users_file(frame.f_code.co_filename)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The user's code that did this; None if it was done for this package, an import or a log line."""
    while frame is not None:
        if is_users(frame):
            return frame
        if _is_ours(frame.f_code.co_filename) or module_of(frame).partition(".")[0] in NOT_THE_TASKS_DOING:
            return None
        frame = frame.f_back
    return None


def has_lost_its_caller(frame: FrameType | None) -> bool:
    """Whether the stack ends before this package: in a greenlet, or in a thread that works for others."""
    while frame is not None:
        if _is_ours(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return True


def innermost(coroutine: Any) -> FrameType | None:
    """The user's innermost frame in what a coroutine awaits."""
    found = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None and is_users(frame):
            found = frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return found


def place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_of(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


@cache
def _is_users_file(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = str(Path(filename).resolve())
    return not path.startswith((*_INSTALLED, _OURS))


@cache
def _is_ours(filename: str) -> bool:
    return not filename.startswith("<") and str(Path(filename).resolve()).startswith(_OURS)
