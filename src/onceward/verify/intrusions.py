"""Detects calls to the outside world that bypass session and ledger.

An audit hook sees files, sockets and processes. CPython reports neither statements on a connection nor connections that
a C library opens, so SQLAlchemy and psycopg are hooked as well. A service that stands for the outside world is wrapped:
a fake opens nothing. An audit hook cannot be removed, one more reason for child processes.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from sqlalchemy import Engine, event

import onceward
from onceward.task.io_guard import NOT_THE_TASKS_DOING

_OURS = str(Path(onceward.__file__).resolve().parent)
_INSTALLED = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WATCHED = {
    "socket.connect": "connected a socket to {1}",
    "socket.sendto": "sent a datagram to {1}",
    "socket.bind": "bound a socket to {1}",
    "subprocess.Popen": "started the process {0}",
    "os.system": "started the process {0}",
    "os.exec": "started the process {0}",
    "os.posix_spawn": "started the process {0}",
    "os.spawn": "started the process {1}",
    "os.fork": "forked a process",
    "os.forkpty": "forked a process",
    "os.remove": "removed the file {0}",
    "os.rename": "renamed the file {0}",
    "os.link": "linked the file {0}",
    "os.symlink": "linked the file {0}",
    "os.truncate": "truncated the file {0}",
    "os.mkdir": "created the directory {0}",
    "os.rmdir": "removed the directory {0}",
    "shutil.copyfile": "copied the file {0}",
    "shutil.rmtree": "removed the directory {0}",
    "shutil.move": "moved the file {0}",
    "sqlite3.connect": "opened another database connection, to {0}",
}
_READS = re.compile(
    r"\s*(select|values|show|explain|pragma|set|begin|commit|rollback|savepoint|release"
    r"|with(?!.*\b(insert|update|delete|merge)\b))\b",
    re.IGNORECASE | re.DOTALL,
)


class Phase(StrEnum):
    """The phase of a delivery, which decides whether outside calls are allowed."""

    OFF = "off"
    """Calls are not watched."""
    EARLY = "early"
    """The inbox has not decided yet whether the event is new."""
    HANDLER = "handler"
    """In the handler, but not in its session or one of its effects."""


class Intrusion(msgspec.Struct, frozen=True):
    """An outside call that should not have happened."""

    phase: Phase
    what: str
    where: str


phase = Phase.OFF
seen: list[Intrusion] = []
coroutine: Any = None
"""The running handler's, in asyncio. SQLAlchemy works for it on a separate stack."""
_packages: set[str] = set()
"""Top-level packages of the user, wherever they are installed."""
_hooked = False
_harmless: frozenset[int] = frozenset()


def claim_package(module: str) -> None:
    """Count everything in this module's top-level package as user code."""
    package = module.partition(".")[0]
    if package != "onceward":
        _packages.add(package)


def is_user_code(frame: FrameType) -> bool:
    """Whether the frame belongs to the user, not to Python, an installed package or onceward."""
    return _module_of(frame).partition(".")[0] in _packages or _is_user_file(frame.f_code.co_filename)


def install(reads: list[Any]) -> None:
    """Watch this process from now on. Calls inside the objects in `reads` are harmless."""
    global _hooked, _harmless
    _harmless = frozenset(map(id, reads))
    if not _hooked:
        _hooked = True
        sys.addaudithook(_audit)
        event.listen(Engine, "before_cursor_execute", _statement)
        _watch_psycopg()


@contextmanager
def during(what: Phase) -> Iterator[None]:
    global phase
    before, phase = phase, what
    try:
        yield
    finally:
        phase = before


def note(what: str, frame: FrameType | None, *, may_be_lost: bool = False) -> None:
    """Record an outside call, if user code made it in a watched phase.

    `may_be_lost`: the call has a separate stack; unless the inbox made it, attribute it to the running handler.
    """
    if phase is Phase.OFF:
        return
    where = _where(frame, may_be_lost)
    if where is None or _is_harmless(frame):
        return
    intrusion = Intrusion(phase, what, where)
    if intrusion not in seen:
        seen.append(intrusion)


def _where(frame: FrameType | None, may_be_lost: bool) -> str | None:
    found = _user_frame(frame)
    if found is None and may_be_lost and phase is Phase.HANDLER and _has_lost_its_caller(frame):
        found = _innermost_user_frame(coroutine)
    return None if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The user code that made the call; None if it was made by onceward, an import or a log line."""
    while frame is not None:
        if is_user_code(frame):
            return frame
        if _is_ours(frame.f_code.co_filename) or _module_of(frame).partition(".")[0] in NOT_THE_TASKS_DOING:
            return None
        frame = frame.f_back
    return None


def _has_lost_its_caller(frame: FrameType | None) -> bool:
    """Whether the stack ends before it reaches onceward: in a greenlet or a worker thread."""
    while frame is not None:
        if _is_ours(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return True


def _innermost_user_frame(coroutine: Any) -> FrameType | None:
    """The innermost frame of user code along a coroutine's chain of awaits."""
    found = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None and is_user_code(frame):
            found = frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return found


def _module_of(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


@cache
def _is_user_file(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = str(Path(filename).resolve())
    return not path.startswith((*_INSTALLED, _OURS))


@cache
def _is_ours(filename: str) -> bool:
    return not filename.startswith("<") and str(Path(filename).resolve()).startswith(_OURS)


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if phase is Phase.OFF:
        return
    what = _describe(name, arguments)
    if what is not None:
        note(what, sys._getframe(1))


def _describe(name: str, arguments: tuple[Any, ...]) -> str | None:
    """What an audit event did; None if it is not watched."""
    if name == "open":
        path, _, flags = arguments
        writes = isinstance(flags, int) and flags & WRITING
        return f"opened the file {path!r:.200} for writing" if writes else None
    text = WATCHED.get(name)
    return None if text is None else text.format(*(f"{each!r:.200}" for each in arguments))


def _statement(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
    if phase is not Phase.OFF and not _READS.match(statement):
        first = " ".join(statement.split())[:80]
        note(f"ran a statement outside the session: {first}", sys._getframe(1), may_be_lost=True)


def _watch_psycopg() -> None:
    psycopg = sys.modules.get("psycopg")
    if psycopg is None:
        return
    for kind in (psycopg.Connection, psycopg.AsyncConnection):
        kind.connect = classmethod(_noting(kind.connect.__func__))


def _noting(connect: Any) -> Any:
    def note_and_connect(cls: Any, *args: Any, **more: Any) -> Any:
        note("opened another database connection", sys._getframe(1))
        return connect(cls, *args, **more)

    return note_and_connect


def _is_harmless(frame: FrameType | None) -> bool:
    """Whether the call was made inside an object that only reads."""
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and id(frame.f_locals.get(code.co_varnames[0])) in _harmless:
            return True
        frame = frame.f_back
    return False


class Outside:
    """A service that stands for the outside world: every call to it is noted, even if a fake opens nothing."""

    def __init__(self, name: str, service: Any) -> None:
        self.__name = name
        self.__service = service

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self.__service, attribute)
        if not callable(value):
            return value

        def note_and_call(*args: Any, **more: Any) -> Any:
            note(f"called {self.__name}.{attribute}", sys._getframe(1))
            return value(*args, **more)

        return note_and_call

    def __call__(self, *args: Any, **more: Any) -> Any:
        note(f"called {self.__name}", sys._getframe(1))
        return self.__service(*args, **more)
