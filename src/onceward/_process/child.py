"""A call in a fork of this process, which may die of it."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from onceward._process.usable_fork import UNUSABLE, USABLE_WITHIN, fork_beside_threads, use_sqlite_or_end
from onceward.errors import portable

_USABLE = b"."
"""What a child writes first: that it can use SQLite."""


class ChildDied(Exception):
    """The process ended without an answer; the message says how."""


def call_in_child(function: Callable[[], Any], seconds: float) -> Any:
    """Return what the function returns there, or raise what it raises. Raises `ChildDied` if there is no answer."""
    for limit in USABLE_WITHIN:
        answer, status = _ask_child(function, seconds, limit)
        if answer is None:
            raise ChildDied(f"did not end within {seconds:g} s")
        if answer:
            break
    else:
        raise ChildDied(f"could not begin: {UNUSABLE}")
    if answer == _USABLE:
        raise ChildDied(_ending(os.waitstatus_to_exitcode(status)))
    result, error = pickle.loads(answer.removeprefix(_USABLE))
    if error is not None:
        raise error
    return result


def _ask_child(function: Callable[[], Any], seconds: float, limit: float) -> tuple[bytes | None, int]:
    """Return what it writes, None if it does not end, and how it ended. It writes nothing if it cannot use SQLite."""
    reader, writer = os.pipe()
    with fork_beside_threads():
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _answer(function, writer, limit)
    os.close(writer)
    try:
        answer = _read_all(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # it has answered, has ended, or never will
        status = os.waitpid(pid, 0)[1]
    return answer, status


def _answer(function: Callable[[], Any], writer: int, limit: float) -> NoReturn:
    try:
        use_sqlite_or_end(limit)
        os.write(writer, _USABLE)
        try:
            answer = pickle.dumps((function(), None))
        except Exception as error:  # noqa: BLE001  the caller raises it
            answer = pickle.dumps((None, portable(error)))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(1)


def _read_all(reader: int, until: float) -> bytes | None:
    """Everything up to the end, or None if that does not come."""
    found = b""
    arrival = select.poll()  # unlike `select`, in a process with thousands of open files, too
    arrival.register(reader, select.POLLIN)
    while True:
        if not arrival.poll(max(until - time.monotonic(), 0) * 1000):
            return None
        part = os.read(reader, 1 << 16)
        if not part:
            return found
        found += part


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
