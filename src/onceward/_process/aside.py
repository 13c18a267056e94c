"""Blocking calls that their caller can leave: on Ctrl-C, on a stop, or when its attempt is asked to end.

Some libraries wait in C or Rust, where Python delivers no signal. Such a call runs in a helper thread, and its caller
waits in Python. A call that was left goes on until its own time limit, and its result is dropped. Helpers are daemons,
so a process ends without them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from math import inf
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
    if not may_be_left(stop):
        return function(*arguments)
    mail: Mail = SimpleQueue()
    with _watched(mail, stop):
        hand_over(partial(copy_context().run, function, *arguments), mail)
        returned: T = _result(_receive(mail, grace))
    return returned


def wait_aside(
    mail: Mail, *, stop: BlockingStop | None = None, grace: float = 0.0, timeout: float | None = None
) -> Any:
    """Return or raise what another thread puts into the mail. Ends early as `call_aside` does, and with `TimeoutError`
    after that many seconds."""
    with _watched(mail, stop):
        return _result(_receive(mail, grace, None if timeout is None else monotonic() + timeout))


def may_be_left(stop: BlockingStop | None) -> bool:
    """Return whether something could end a wait of this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return stop is not None or is_main or current_token() is not None


@contextmanager
def _watched(mail: Mail, stop: BlockingStop | None) -> Iterator[None]:
    token = current_token()
    if token is None and stop is None:
        yield
        return
    with ExitStack() as watched:
        if token is not None:
            canceller = token.add(partial(mail.put, AttemptInterrupted))
            watched.callback(token.remove, canceller)
        if stop is not None:
            watched.enter_context(stop.calling(partial(mail.put, Stopped)))
            if stop.requested:
                mail.put(Stopped)
        yield


def _result(reply: Reply) -> Any:
    result, error = reply
    if error is not None:
        try:
            raise error
        finally:
            del error, reply  # it refers to this frame
    return result


def _receive(mail: Mail, grace: float, deadline: float | None = None) -> Reply:
    until: float | None = None
    while True:
        ends = (
            min(monotonic() + SIGNAL_CHECK, inf if deadline is None else deadline) if until is None else until
        )
        try:
            got = mail.get(timeout=max(ends - monotonic(), 0.0))
        except Empty:
            if until is not None:
                raise Stopped("a stop came before the answer") from None
            if ends == deadline:
                raise TimeoutError from None
            continue
        if isinstance(got, tuple):
            return got
        if got is AttemptInterrupted:
            raise AttemptInterrupted("this attempt was asked to end before the answer came")
        until = until or monotonic() + grace


def hand_over(function: Callable[[], Any], mail: Mail) -> None:
    """Call the function in a helper thread, which puts the reply into the mail."""
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
