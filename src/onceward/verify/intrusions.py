"""What code does to the world while it should not: an audit hook, and a look at every SQL statement.

CPython reports files, sockets and processes. It does not report statements on a connection, nor connections that a C
library opens: these are seen where SQLAlchemy and psycopg pass. A child has one hook, which cannot be removed; that is
one more reason for children.
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

# Whose code a frame is: the user's, or that of Python, of installed packages, or of this package.


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


class Phase(StrEnum):
    """Where a delivery is, as far as effects are concerned."""

    OFF = "off"
    """Nobody's business."""
    EARLY = "early"
    """It is not known yet whether the event is new."""
    HANDLER = "handler"
    """In the handler, and neither in its session nor in an effect of it."""


class Sight(msgspec.Struct, frozen=True):
    """Something that was done, by whom."""

    phase: Phase
    what: str
    where: str


phase = Phase.OFF
sights: list[Sight] = []
_hooked = False
_harmless: frozenset[int] = frozenset()
coroutine: Any = None
"""Of the handler that runs now, in asyncio. What SQLAlchemy does for it has a stack of its own, without it."""

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
    "os.truncate": "cut the file {0}",
    "os.mkdir": "made the folder {0}",
    "os.rmdir": "removed the folder {0}",
    "shutil.copyfile": "copied the file {0}",
    "shutil.rmtree": "removed the folder {0}",
    "shutil.move": "moved the file {0}",
    "sqlite3.connect": "opened another database connection, to {0}",
}
_READS = re.compile(
    r"\s*(select|values|show|explain|pragma|set|begin|commit|rollback|savepoint|release"
    r"|with(?!.*\b(insert|update|delete|merge)\b))\b",
    re.IGNORECASE | re.DOTALL,
)


def install(reads: list[Any]) -> None:
    """In this process from now on. `reads` are objects whose doings are harmless."""
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
    """Something happened here; it counts if it is the user's doing, at the wrong time.

    `may_be_lost`: it has a stack of its own, and was done for the handler that runs if it was not for the inbox.
    """
    if phase is Phase.OFF:
        return
    where = _where(frame, may_be_lost)
    if where is None or _is_harmless(frame):
        return
    sight = Sight(phase, what, where)
    if sight not in sights:
        sights.append(sight)


def _where(frame: FrameType | None, may_be_lost: bool) -> str | None:
    found = users_frame(frame)
    if found is None and may_be_lost and phase is Phase.HANDLER and has_lost_its_caller(frame):
        found = innermost(coroutine)
    return None if found is None else place(found)


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if phase is Phase.OFF:
        return
    told = _told(name, arguments)
    if told is not None:
        note(told, sys._getframe(1))


def _told(name: str, arguments: tuple[Any, ...]) -> str | None:
    if name == "open":
        path, _, flags = arguments
        writes = isinstance(flags, int) and flags & WRITING
        return f"opened the file {path!r:.200} for writing" if writes else None
    text = WATCHED.get(name)
    return None if text is None else text.format(*(f"{each!r:.200}" for each in arguments))


def _statement(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
    if phase is not Phase.OFF and not _READS.match(statement):
        first = " ".join(statement.split())[:80]
        note(f"ran a statement of its own beside the session: {first}", sys._getframe(1), may_be_lost=True)


def _watch_psycopg() -> None:
    psycopg = sys.modules.get("psycopg")
    if psycopg is None:
        return
    for kind in (psycopg.Connection, psycopg.AsyncConnection):
        kind.connect = classmethod(_noting(kind.connect.__func__))


def _noting(connect: Any) -> Any:
    def noted(cls: Any, *args: Any, **more: Any) -> Any:
        note("opened another database connection", sys._getframe(1))
        return connect(cls, *args, **more)

    return noted


def _is_harmless(frame: FrameType | None) -> bool:
    """Whether it happened inside something that only reads."""
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and id(frame.f_locals.get(code.co_varnames[0])) in _harmless:
            return True
        frame = frame.f_back
    return False


# A service that stands for the outside world: calls to it are seen, even if it is a fake that opens nothing.


class Outside:
    """The service, with each call noted."""

    def __init__(self, name: str, service: Any) -> None:
        self.__name = name
        self.__service = service

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self.__service, attribute)
        if not callable(value):
            return value

        def called(*args: Any, **more: Any) -> Any:
            note(f"called {self.__name}.{attribute}", sys._getframe(1))
            return value(*args, **more)

        return called

    def __call__(self, *args: Any, **more: Any) -> Any:
        note(f"called {self.__name}", sys._getframe(1))
        return self.__service(*args, **more)
