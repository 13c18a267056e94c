"""Threads, tasks and callbacks that a step of a delivery starts: they belong to it, and must end before it does.

Tasks and callbacks inherit the context of the code that starts them, threads and executors do not. Here all of them get
it, with the line that started them. Only in children: what is replaced here stays replaced.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import gc
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import FrameType
from typing import Any
from weakref import WeakSet, finalize

from onceward.verify.watch import intrusions
from onceward.verify.watch.intrusions import OFF, Background, Intrusion, Phase, Scope

LINGER = 0.25
"""Seconds that the kit waits for what a handler left running, to see what it does."""
GRACE = 0.05
LONGEST_FINALIZER = 5.0
ADVICE = (
    "nothing waits for it and no transaction covers it: a crash loses it, and a failed attempt does it all the same. "
    "Wait for it before you return, or do its work in session.effect(…)"
)
EFFECT_ADVICE = (
    "the effect is done when its call returns: a crash loses what still runs, and nobody sees whether it fails. Wait "
    "for it in the call"
)
_STARTERS = ("threading", "concurrent", "asyncio", "multiprocessing")
"""Packages through which user code starts something."""
_DATABASES = (*intrusions.SESSIONS, "sqlalchemy.")
"""Their threads serve connections, on which statements are watched."""
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_revived: WeakSet[Executor] = WeakSet()
_waited_for: set[str] = set()
_finalizers: list[tuple[Any, Scope, str | None]] = []
"""Those that user code made in a step, with the step and the line."""


def install() -> None:
    """From now on, pass the step on to whatever this process starts."""
    _replace(threading.Thread, "start", _start)
    _replace(_thread, "start_new_thread", _start_bare)
    _replace(ThreadPoolExecutor, "submit", _submit)
    _replace(ProcessPoolExecutor, "submit", _noting("handed work to another process"))
    _replace(BaseProcess, "start", _noting("started another process"))
    _replace(asyncio.BaseEventLoop, "create_task", _create_task)
    for name, position in (("call_soon", 1), ("call_later", 2), ("call_at", 2), ("call_soon_threadsafe", 1)):
        _replace(asyncio.BaseEventLoop, name, partial(_call, position))
    for name in ("alarm", "setitimer"):
        _replace(signal, name, _alarm)
    _replace(atexit, "register", _register)
    _replace(finalize, "__init__", _finalize)


def note_left_running(scope: Scope) -> None:
    """Called when a step has returned: what it started itself must have ended."""
    for each in scope.started:
        if each.by_user and not each.is_done():
            what = f"started {each.what} that was still running when it returned,"
            intrusions.add(Intrusion(scope.phase, what, each.where, ADVICE))


def note_left_by_effect(name: str, scope: Scope) -> None:
    """Called when the call of an effect has returned."""
    for each in scope.started:
        if each.by_user and not each.is_done():
            what = f"started {each.what} in effect {name!r} that was still running when the effect returned,"
            intrusions.add(Intrusion(Phase.HANDLER, what, each.where, EFFECT_ADVICE))


def finish() -> None:
    """Have finalizers run that the process would run at its end, or whenever memory is collected: they belong to the
    step that made them."""
    with intrusions.during(Phase.HANDLER):
        gc.collect()
    for finalizer, scope, where in _finalizers:
        context = copy_context()
        context.run(intrusions.enter, scope, where)
        # On a stack without the kit: it is nobody's call.
        alone = threading.Thread(target=context.run, args=(finalizer,), daemon=True)
        alone.start()
        alone.join(LONGEST_FINALIZER)
    _finalizers.clear()


def still_running(scope: Scope) -> Callable[[], bool] | None:
    """Whether something still runs that is worth waiting for; None if there is nothing like that."""
    left = [each for each in scope.started if each.where not in _waited_for and not each.is_done()]
    _waited_for.update(each.where for each in left)
    return (lambda: not all(each.is_done() for each in left)) if left else None


# ── what is replaced ────────────────────────────────────────────────────────────────────────────────────


def _start(real: Any, self: threading.Thread) -> Any:
    frame = sys._getframe(2)
    if (
        frame.f_globals.get("__name__") != "concurrent.futures.thread"
    ):  # there, each piece of work has its own
        context, where = _inherit(frame)
        if context is not None:
            run = self.run
            self.run = partial(context.run, run)  # type: ignore[method-assign]
            _keep("a thread", where, frame, partial(_has_ended, self))
    return real(self)


def _start_bare(real: Any, function: Any, args: Any, *more: Any) -> Any:
    """A thread without an object."""
    frame = sys._getframe(2)
    context, where = _inherit(frame)
    if context is None:
        return real(function, args, *more)
    ended = threading.Event()

    def run(*given: Any, **named: Any) -> None:
        try:
            context.run(function, *given, **named)
        finally:
            ended.set()

    _keep("a thread", where, frame, lambda: ended.wait(GRACE))
    return real(run, args, *more)


def _has_ended(thread: threading.Thread) -> bool:
    """A thread that has nothing left to do, such as a canceled timer's, still takes a moment to end."""
    if thread.ident is not None:
        thread.join(GRACE)
    return not thread.is_alive()


def _submit(real: Any, self: ThreadPoolExecutor, function: Any, /, *args: Any, **more: Any) -> Any:
    _revive(self)
    frame = sys._getframe(2)
    context, where = _inherit(frame)
    if context is None:
        return real(self, function, *args, **more)
    future = real(self, context.run, function, *args, **more)
    _keep("work in another thread", where, frame, future.done)
    return future


def _create_task(real: Any, *args: Any, **more: Any) -> Any:
    frame = sys._getframe(2)
    context, where = _inherit(frame, more.get("context"))
    if context is None:
        return real(*args, **more)
    task = real(*args, **{**more, "context": context})
    _keep("a task", where, frame, lambda: task.done() or task.cancelling() > 0)
    return task


def _call(position: int, real: Any, *args: Any, **more: Any) -> Any:
    """A callback of an event loop. Those of libraries inherit the context without help."""
    frame = sys._getframe(2)
    if len(args) <= position or not intrusions.is_user_code(frame):
        return real(*args, **more)
    context, where = _inherit(frame, more.get("context"))
    callback, ended = args[position], threading.Event()

    def call(*given: Any) -> None:
        try:
            callback(*given)
        finally:
            ended.set()

    handle = real(*args[:position], call, *args[position + 1 :], **{**more, "context": context})
    _keep("a callback", where, frame, lambda: ended.is_set() or handle.cancelled())
    return handle


def _alarm(real: Any, *args: Any) -> Any:
    """A timer of the process, which ends with a signal."""
    frame = sys._getframe(2)
    _, where = _inherit(frame)
    left = real(*args)
    _keep("a timer", where, frame, lambda: not any(signal.getitimer(each)[0] for each in _TIMERS))
    return left


def _register(real: Any, function: Any, /, *args: Any, **more: Any) -> Any:
    frame = sys._getframe(2)
    if intrusions.is_user_code(frame):  # libraries have reasons of their own
        intrusions.note("registered work for the end of the process", frame, advice=ADVICE)
    return real(function, *args, **more)


def _finalize(real: Any, self: Any, /, *args: Any, **more: Any) -> Any:
    scope, frame = intrusions.current(), sys._getframe(2)
    if scope is not None and intrusions.is_watched() and intrusions.is_user_code(frame):
        _finalizers.append((self, scope, intrusions.find_origin(frame)))
    return real(self, *args, **more)


def _noting(what: str) -> Any:
    def note_and_call(real: Any, *args: Any, **more: Any) -> Any:
        intrusions.note(what, sys._getframe(2))
        return real(*args, **more)

    return note_and_call


def _replace(owner: Any, name: str, replacement: Any) -> None:
    real = getattr(owner, name)

    def replaced(*args: Any, **more: Any) -> Any:
        return replacement(real, *args, **more)

    setattr(owner, name, replaced)


# ── whose it is ─────────────────────────────────────────────────────────────────────────────────────────


def _inherit(frame: FrameType, given: Context | None = None) -> tuple[Context | None, str | None]:
    """The context for what is started here, and the line that starts it; None if it belongs to no step."""
    scope = intrusions.current()
    if scope is None:
        return given, None
    where = intrusions.find_starter(frame, not_through=_DATABASES)
    context = copy_context() if given is None else given
    with suppress(RuntimeError):  # it is the context that runs now
        context.run(intrusions.enter, OFF if where is None else scope, where)
    return context, where


def _keep(what: str, where: str | None, frame: FrameType, is_done: Callable[[], bool]) -> None:
    scope = intrusions.current()
    if scope is not None and scope is not OFF and where is not None:
        scope.started.append(Background(what, where, is_done, _by_user(frame)))


def _by_user(frame: FrameType) -> bool:
    for each in intrusions.outwards(frame):
        if intrusions.top_package(each) not in _STARTERS:
            return intrusions.is_user_code(each)
    return False


def _revive(executor: Any) -> None:
    """An executor from before the fork counts on threads that only the parent has."""
    if executor in _revived:
        return
    _revived.add(executor)
    own = vars(executor)
    if own["_threads"] and not any(thread.is_alive() for thread in own["_threads"]):
        own["_threads"].clear()
        own["_work_queue"] = SimpleQueue()
        own["_idle_semaphore"] = threading.Semaphore(0)
        own["_shutdown_lock"] = threading.Lock()
