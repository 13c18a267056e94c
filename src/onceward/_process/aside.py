"""Blocking calls that their caller can leave: on Ctrl-C, on a stop, or when its attempt is asked to end.

Some libraries wait in C or Rust, where Python delivers no signal. Such a call runs in a helper thread, and its caller
waits in Python. A call that was left goes on until its own time limit, and its result is dropped. Helpers are daemons,
so a process ends without them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from onceward.task.cancellation import current_token
from onceward.task.exceptions import AttemptInterrupted

if TYPE_CHECKING:
    from onceward._process.stop import BlockingStop

T = TypeVar("T")
Reply = tuple[Any, BaseException | None]
Mail = SimpleQueue[Reply | type[BaseException]]

SIGNAL_CHECK = 0.25
"""Seconds after which the main thread looks for signals: one that another thread received does not wake it."""
MOST_IDLE = 32
"""Helpers kept for the next calls."""


class Stopped(Exception):
    """A stop came before the answer."""


def call_aside(
    function: Callable[..., T], *arguments: Any, stop: BlockingStop | None = None, grace: float = 0.0
) -> T:
    """Return what the function returns, or raise what it raises.

    A signal handler that raises ends the wait at once, a stop after `grace` seconds with `Stopped`, and the end of the
    attempt that calls this with `AttemptInterrupted`. Where none of them can happen, the function is called in place.
    """
    token = current_token()
    if stop is None and token is None and threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    mail: Mail = SimpleQueue()
    with ExitStack() as watched:
        if token is not None:
            canceller = token.add(partial(mail.put, AttemptInterrupted))
            watched.callback(token.remove, canceller)
        if stop is not None:
            watched.enter_context(stop.calling(partial(mail.put, Stopped)))
            if stop.requested:
                mail.put(Stopped)
        _hand_over(partial(copy_context().run, function, *arguments), mail)
        result, error = _receive(mail, grace)
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame
    returned: T = result
    return returned


def call_together(function: Callable[[], object], times: int) -> None:
    """Call the function several times at once, and wait for all. A signal handler that raises ends the wait."""
    mail: Mail = SimpleQueue()
    for _ in range(times):
        _hand_over(partial(copy_context().run, function), mail)
    errors = [error for _, error in [_receive(mail, 0.0) for _ in range(times)] if error is not None]
    if errors:
        raise errors[0]


def _receive(mail: Mail, grace: float) -> Reply:
    until: float | None = None
    while True:
        try:
            got = mail.get(timeout=SIGNAL_CHECK if until is None else max(until - monotonic(), 0.0))
        except Empty:
            if until is not None:
                raise Stopped("a stop came before the answer") from None
            continue
        if isinstance(got, tuple):
            return got
        if got is AttemptInterrupted:
            raise AttemptInterrupted("this attempt was asked to end before the answer came")
        until = until or monotonic() + grace


def _hand_over(function: Callable[[], Any], mail: Mail) -> None:
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = SimpleQueue()
        threading.Thread(target=_help, args=(jobs,), name="onceward-aside", daemon=True).start()
    jobs.put((function, mail))


def _help(jobs: SimpleQueue[tuple[Callable[[], Any], Mail]]) -> None:
    while True:
        function, mail = jobs.get()
        try:
            reply: Reply = function(), None
        except BaseException as error:  # noqa: BLE001  the caller raises it
            reply = None, error
        ready = len(_idle) < MOST_IDLE
        if ready:
            _idle.append(jobs)  # first: the caller's next call finds it
        mail.put(reply)
        del function, mail, reply  # not to be kept until the next call
        if not ready:
            return


_idle: deque[SimpleQueue[Any]] = deque()
os.register_at_fork(after_in_child=_idle.clear)
