"""The I/O guard: warn or raise if a task itself opens a socket, file or process.

Tasks get their I/O injected. With `EngineSettings.io_guard` set to `warn` or `raise`, an audit hook checks what CPython
reports while `process_transaction` or `produce_transaction` runs. I/O is the task's own if the call stack leads back
to the task's method without passing through an injected connector or service. With the guard off, there is no hook
and nothing is wrapped.
"""

from __future__ import annotations

import sys
import warnings
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, NamedTuple

from onceward.middleware import Middleware, StepCall, StepInfo
from onceward.task.base import BaseTask
from onceward.task.exceptions import IOGuardError

WATCHED = frozenset(
    {
        "open", "socket.__new__", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto",
        "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
        "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.truncate",
        "shutil.copyfile", "shutil.rmtree", "shutil.move", "urllib.Request", "http.client.connect",
        "ftplib.connect", "smtplib.connect", "sqlite3.connect", "tempfile.mkstemp", "tempfile.mkdtemp",
    }
)  # fmt: skip

NOT_THE_TASKS_DOING = (
    "importlib",
    "logging",
    "linecache",
    "traceback",
    "warnings",
    "loguru",
    "opentelemetry",
    "sentry_sdk",
    "structlog",
    "zoneinfo",
)
"""Modules that do I/O for the interpreter, the log or telemetry: imports, log lines, tracebacks."""
SESSIONS = ("onceward.db.", "onceward.inbox.", "onceward.storage.")
"""Modules that do the I/O of a session passed to the task."""


class Watched(NamedTuple):
    """The task's method running in this context, and what may do I/O for it."""

    method: CodeType
    name: str
    injected: frozenset[int]
    code_of_injected: frozenset[CodeType]
    raises: bool


_watched: ContextVar[Watched | None] = ContextVar("onceward_io_guard", default=None)
_hooked = False


class IoGuard(Middleware):
    """Reports I/O that a task does itself instead of through a connector or service."""

    name = "I/O guard"

    def __init__(self, task: BaseTask, *, raises: bool) -> None:
        self._task = task
        self._raises = raises

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        task = self._task
        method = getattr(
            task,
            {"process": "process_transaction", "produce": "produce_transaction"}.get(step.name, ""),
            None,
        )
        code = getattr(getattr(method, "__func__", method), "__code__", None)
        if code is None:
            return call
        _install()
        injected = [*task.connectors.values(), *task.services.values()]
        watched = Watched(
            code,
            f"{task.name}.{code.co_name}",
            frozenset(map(id, injected)),
            frozenset(each.__code__ for each in injected if hasattr(each, "__code__")),
            self._raises,
        )

        async def guarded(*arguments: Any) -> Any:
            token = _watched.set(watched)
            try:
                return await call(*arguments)
            finally:
                _watched.reset(token)

        return guarded


def _install() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...], events: Any = WATCHED, current: Any = _watched) -> None:
    # The last two are arguments because the interpreter, as it ends, clears this module before it removes the hook.
    if event not in events:
        return
    watched: Watched | None = current.get()
    if watched is None or not _is_own(sys._getframe(1), watched):
        return
    token = _watched.set(None)
    try:
        where = _line_in_task(sys._getframe(1), watched)
        text = (
            f"{watched.name} did its own I/O: {event}({_format(event, arguments)}) at {where}. "
            "Move it into a service or connector and inject that."
        )
        if watched.raises:
            raise IOGuardError(text)
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        except Warning:
            raise  # the user turns warnings into errors
        except Exception:  # noqa: BLE001  they may be logged, and a log handler decides nothing
            return
    finally:
        _watched.reset(token)


def _is_own(frame: FrameType | None, watched: Watched) -> bool:
    while frame is not None:
        code = frame.f_code
        if code is watched.method:
            return True
        module = _module(frame)
        if code in watched.code_of_injected or module.partition(".")[0] in NOT_THE_TASKS_DOING:
            return False
        if module.startswith(SESSIONS):
            return False
        if code.co_argcount and id(frame.f_locals.get(code.co_varnames[0])) in watched.injected:
            return False
        frame = frame.f_back
    # Not under the task's method: a thread or callback that merely inherited its context.
    return False


def _module(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def _line_in_task(frame: FrameType | None, watched: Watched) -> str:
    while frame is not None:
        if frame.f_code is watched.method:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def _format(event: str, arguments: tuple[Any, ...]) -> str:
    # Only a path, an address or a program name; environments and bodies stay out of messages.
    shown = arguments[1:2] if event in ("socket.connect", "socket.bind", "socket.sendto") else arguments[:1]
    return ", ".join(repr(each) for each in shown)[:200]
