"""Detects calls to the outside world that bypass session and ledger.

An audit hook sees files, sockets and processes; SQLAlchemy reports statements; `traffic` sees what CPython does not
report. A context variable says in which step of a delivery a call is made. Tasks inherit it, and `background` passes it
on to threads. A service that stands for the outside world is wrapped: a fake opens nothing. An audit hook cannot be
removed, one more reason for child processes.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from sqlalchemy import Engine, event

import onceward
from onceward.task.io_guard import NOT_THE_TASKS_DOING
from onceward.verify.watch.escapes import EscapeError, dropped_by, escape_of, with_values
from onceward.verify.watch.statements import only_reads

_OURS = str(Path(onceward.__file__).resolve().parent)
SESSIONS = ("onceward.db.",)
"""A session may open another database to read; its statements are watched."""
_KIT = tuple(
    str(Path(__file__).resolve().parent.with_name(name)) for name in ("faults.py", "stage.py", "children.py")
)
"""Where a stack leaves user code and what it called."""
_INSTALLED = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WATCHED = {
    "socket.connect": "connected a socket to {1}",
    "socket.sendto": "sent a datagram to {1}",
    "socket.sendmsg": "sent a message to {1}",
    "socket.bind": "bound a socket to {1}",
    "subprocess.Popen": "started the process {0}",
    "os.system": "started the process {0}",
    "os.exec": "started the process {0}",
    "os.posix_spawn": "started the process {0}",
    "os.spawn": "started the process {1}",
    "os.fork": "forked a process",
    "os.forkpty": "forked a process",
    "os.kill": "sent a signal to process {0}",
    "os.killpg": "sent a signal to process group {0}",
    "os.remove": "removed the file {0}",
    "os.rename": "renamed the file {0}",
    "os.link": "linked the file {0}",
    "os.symlink": "linked the file {0}",
    "os.truncate": "truncated the file {0}",
    "os.mkdir": "created the directory {0}",
    "os.rmdir": "removed the directory {0}",
    "os.chmod": "changed the mode of the file {0}",
    "os.utime": "changed the time of the file {0}",
    "os.chown": "changed the owner of the file {0}",
    "os.setxattr": "changed an attribute of the file {0}",
    "shutil.copyfile": "copied the file {0}",
    "shutil.rmtree": "removed the directory {0}",
    "shutil.move": "moved the file {0}",
    "sqlite3.connect": "opened another database connection, to {0}",
}
_LOOPS = ("asyncio.events", "asyncio.runners")
"""Modules that run a callback or the step of a task: their callers did not make the call."""


class Phase(StrEnum):
    """The step of a delivery, which decides whether outside calls are allowed."""

    OFF = "off"
    """Allowed: in the session, in one of its effects, or outside of all deliveries."""
    EARLY = "early"
    """The inbox has not decided yet whether the event is new."""
    HANDLER = "handler"
    """In the handler, but not in its session or one of its effects."""
    SUCCESS = "success"
    """In `handle_transaction_success`, after the commit."""
    FAILURE = "failure"
    """In `handle_transaction_exception`, after the rollback."""


class Intrusion(msgspec.Struct, frozen=True):
    """An outside call that should not have happened."""

    phase: Phase
    what: str
    where: str
    advice: str = ""
    """Replaces the usual advice."""


class Background(msgspec.Struct, frozen=True):
    """A thread, task or callback that a step started."""

    what: str
    where: str
    is_done: Callable[[], bool]
    by_user: bool
    """Whether user code started it itself, not a library on its behalf."""


class Scope:
    """One run of one step. It outlives the step in threads and tasks that the step has started."""

    def __init__(self, phase: Phase, coroutine: Any = None, processor: Any = None) -> None:
        self.phase = phase
        self.coroutine = coroutine
        """The running handler's, in asyncio. Callbacks run for it on a stack of their own."""
        self.processor = processor
        """The inbox's, which works for the delivery before the handler does. None outside of deliveries."""
        self.started: list[Background] = []


OFF = Scope(Phase.OFF)
seen: list[Intrusion] = []
connected: set[int] = set()
"""File numbers of sockets whose connection was an outside call itself."""
_scope: ContextVar[Scope | None] = ContextVar("onceward_verification", default=None)
started_at: ContextVar[str | None] = ContextVar("onceward_verification_started_at", default=None)
"""The line that started this thread, task or callback."""
_packages: set[str] = set()
"""Top-level packages of the user, wherever they are installed."""
_harmless: frozenset[int] = frozenset()
_consumer = "an unknown line"
_foreign: Collection[str] | None = None
_temporary: dict[str | None, Intrusion] = {}
"""Temporary tables of the handler that is running, by their names."""
FOREIGN_TABLES = "SELECT relname FROM pg_class WHERE relkind = 'f'"
ESCAPED = (
    "it is outside the session's transaction, so it is neither rolled back nor kept from happening twice. Set "
    "mode='effectful' in the contract and do it in session.effect(…), with a connection of its own"
)


def claim_package(module: str) -> None:
    """Count everything in this module's top-level package as user code."""
    package = module.partition(".")[0]
    if package != "onceward":
        _packages.add(package)


def blame(consumer: Any) -> None:
    """Where calls are placed whose line is unknown: the first line of the consumer."""
    global _consumer
    named: Any = sys.modules.get(consumer.__module__)
    for name in consumer.__qualname__.split("."):
        named = getattr(named, name, None)
    handler = inspect.unwrap(getattr(named or consumer, "process_transaction", named))
    code = getattr(handler, "__code__", None)
    if code is not None:
        _consumer = f"{code.co_filename}:{code.co_firstlineno}"


def is_user_code(frame: FrameType) -> bool:
    """Whether the frame belongs to the user, not to Python, an installed package or onceward."""
    return top_package(frame) in _packages or _is_user_file(frame.f_code.co_filename)


def install() -> None:
    """Watch this process from now on."""
    sys.addaudithook(_audit)
    event.listen(Engine, "before_cursor_execute", _statement)


def allow(reads: list[Any]) -> None:
    """Calls inside these objects are harmless."""
    global _harmless
    _harmless = frozenset(map(id, reads))


# ── where in a delivery ─────────────────────────────────────────────────────────────────────────────────


def current() -> Scope | None:
    """The step that this code works for; None if the kit did not start it."""
    return _scope.get()


def is_allowed() -> bool:
    """Whether this code may make outside calls: in the session, or in an effect."""
    scope = _scope.get()
    return scope is not None and scope.phase is Phase.OFF


def is_watched() -> bool:
    """Whether this code works for a step that makes no outside calls."""
    scope = _scope.get()
    return scope is not None and scope.phase is not Phase.OFF


@contextmanager
def during(phase: Phase, *, coroutine: Any = None, processor: Any = None) -> Iterator[Scope]:
    with _within(OFF if phase is Phase.OFF else Scope(phase, coroutine, processor)) as scope:
        yield scope


@contextmanager
def during_effect() -> Iterator[Scope]:
    """Outside calls are allowed, but what is started for them belongs to the effect."""
    with _within(Scope(Phase.OFF)) as scope:
        yield scope


@contextmanager
def _within(scope: Scope) -> Iterator[Scope]:
    before = _scope.get()
    _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.set(before)  # not `reset`: a coroutine may be closed in another context


def enter(scope: Scope, where: str | None) -> None:
    """Make the rest of this context a part of a step, started at a line."""
    _scope.set(scope)
    started_at.set(where)


# ── who did it ──────────────────────────────────────────────────────────────────────────────────────────


def note(
    what: str,
    frame: FrameType | None,
    *,
    advice: str = "",
    sends: bool = False,
    not_through: tuple[str, ...] = (),
) -> None:
    """Record an outside call, if it was made for user code in a watched step.

    `sends`: it sends or takes messages, which no code does on behalf of a delivery. `not_through`: packages that may do
    this for user code.
    """
    where = find_origin(frame, sends=sends, not_through=not_through)
    if where is not None:
        add(Intrusion(_phase(), what, where, advice))


def add(intrusion: Intrusion) -> None:
    if intrusion not in seen:
        seen.append(intrusion)


def find_origin(
    frame: FrameType | None, *, sends: bool = False, not_through: tuple[str, ...] = ()
) -> str | None:
    """The line of user code that made a call; None if nothing is wrong with it.

    It may have been made through a library or onceward, but not by the inbox, an import or a log line.
    """
    scope = _scope.get()
    if scope is None or not is_watched() or _is_harmless(frame):
        return None
    return _line_of(scope, frame, sends, not_through)


def find_starter(frame: FrameType, *, not_through: tuple[str, ...]) -> str | None:
    """The line of user code that starts something, also in an effect; None if no step is to wait for it."""
    scope = _scope.get()
    if scope is None or scope is OFF or _is_harmless(frame):
        return None
    return _line_of(scope, frame, False, not_through)


def _line_of(scope: Scope, frame: FrameType | None, sends: bool, not_through: tuple[str, ...]) -> str | None:
    for each in outwards(frame):
        if is_user_code(each):
            return f"{each.f_code.co_filename}:{each.f_lineno}"
        if _is_in(_KIT, each.f_code.co_filename) or top_package(each) in NOT_THE_TASKS_DOING:
            return None
        if scope.phase is Phase.EARLY and not sends and _works_for_delivery(each, scope):
            return None
        if not_through and _module(each).startswith(not_through):
            return None
        if _module(each) in _LOOPS:
            break
    # The stack ends before it reaches the kit: this is a thread, a task or a callback.
    started = started_at.get()
    if started is None and scope.phase is not Phase.EARLY:
        inner = _innermost_user_frame(scope.coroutine)
        return _consumer if inner is None else f"{inner.f_code.co_filename}:{inner.f_lineno}"
    return started


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers. SQLAlchemy works for coroutines in greenlets, which have stacks of their own."""
    greenlet = sys.modules.get("greenlet")
    lane = None if greenlet is None else greenlet.getcurrent()
    while True:
        while frame is not None:
            yield frame
            frame = frame.f_back
        lane = None if lane is None else lane.parent
        if lane is None:
            return
        frame = lane.gr_frame


def is_through(frame: FrameType, packages: tuple[str, ...]) -> bool:
    """Whether user code made a call through one of these packages."""
    for each in outwards(frame):
        if is_user_code(each):
            return False
        if _module(each).startswith(packages):
            return True
    return False


def top_package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def _phase() -> Phase:
    scope = _scope.get()
    return Phase.OFF if scope is None else scope.phase


def _works_for_delivery(frame: FrameType, scope: Scope) -> bool:
    """In a delivery: the inbox, even inside the user's middleware. In an import or `__init__`: all of onceward, which
    opens connections there that a handler uses later."""
    if scope.processor is None:
        return _is_in(_OURS, frame.f_code.co_filename)
    return _first_argument(frame) is scope.processor


def _innermost_user_frame(coroutine: Any) -> FrameType | None:
    """The innermost frame of user code along a coroutine's chain of awaits, or on the stack that runs it."""
    if getattr(coroutine, "cr_running", False):
        for stack in map(list, map(outwards, sys._current_frames().values())):
            if coroutine.cr_frame in stack:
                return next(filter(is_user_code, stack), None)
    found = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None and is_user_code(frame):
            found = frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return found


@cache
def _is_user_file(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = str(Path(filename).resolve())
    return not path.startswith((*_INSTALLED, _OURS))


@cache
def _is_in(places: str | tuple[str, ...], filename: str) -> bool:
    return not filename.startswith("<") and str(Path(filename).resolve()).startswith(places)


def _is_harmless(frame: FrameType | None) -> bool:
    """Whether the call was made inside an object that only reads."""
    return bool(_harmless) and any(id(_first_argument(each)) in _harmless for each in outwards(frame))


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


# ── hooks ───────────────────────────────────────────────────────────────────────────────────────────────


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if _phase() is Phase.OFF:
        return
    what = _describe(name, arguments)
    if name == "socket.connect":
        connected.add(arguments[0].fileno())
    if what is not None:
        note(what, sys._getframe(1), not_through=SESSIONS if name == "sqlite3.connect" else ())


def _describe(name: str, arguments: tuple[Any, ...]) -> str | None:
    """What an audit event did; None if it is not watched."""
    if name == "open":
        path, _, flags = arguments
        writes = isinstance(flags, int) and flags & WRITING and path != os.devnull
        return f"opened the file {path!r:.200} for writing" if writes else None
    if name == "os.kill" and arguments[1] == 0:
        return None  # it asks whether a process is there
    if name == "os.mkdir" and arguments[2] == -1 and os.path.isdir(arguments[0]):
        return None  # it changes nothing, as with exist_ok
    text = WATCHED.get(name)
    return None if text is None else text.format(*(f"{each!r:.200}" for each in arguments))


def _statement(connection: Any, cursor: Any, statement: str, values: Any, *_: Any) -> None:
    note_escape(statement, values, sys._getframe(1), lambda: _foreign_tables(connection))
    note_statement(statement, sys._getframe(1))


def note_escape(
    statement: str, values: Any, frame: FrameType, foreign_tables: Callable[[], Collection[str]]
) -> None:
    """Record a statement of the session that does something outside its transaction, and do not run it."""
    escape = escape_of(with_values(statement, values), foreign_tables)
    if escape is None:
        _temporary.pop(dropped_by(statement), None)
        return
    lines = (f"{each.f_code.co_filename}:{each.f_lineno}" for each in outwards(frame) if is_user_code(each))
    first = " ".join(statement.split())[:80]
    what, where = f"ran a statement that {escape.what}: {first}", next(lines, _consumer)
    intrusion = Intrusion(Phase.HANDLER, what, where, escape.advice or ESCAPED)
    if escape.until_dropped:
        _temporary[escape.until_dropped] = intrusion
        return
    add(intrusion)
    if escape.stopped:
        raise EscapeError(f"the verification does not run a statement that {escape.what}: {first}")


def note_temporary() -> None:
    """The handler has returned: what it created and did not drop outlives its transaction."""
    for each in list(_temporary):
        add(_temporary.pop(each))


def _foreign_tables(connection: Any) -> Collection[str]:
    """The tables of other servers that the database shows as its own. Asked once: a handler makes none."""
    global _foreign
    if connection.dialect.name != "postgresql":
        return ()
    if _foreign is None:
        _foreign = ()  # the query comes here, too
        _foreign = set(connection.exec_driver_sql(FOREIGN_TABLES).scalars())
    return _foreign


def note_statement(statement: str, frame: FrameType, not_through: tuple[str, ...] = ()) -> None:
    """Record a statement on a connection that is not the session's, unless it plainly reads."""
    if _phase() is not Phase.OFF and not only_reads(statement):
        first = " ".join(statement.split())[:80]
        note(f"ran a statement outside the session: {first}", frame, not_through=not_through)
