"""Child processes: everything of the user's runs in one, so that it may hang, die or leave traces behind.

They are forked, so that they know the consumer and its events whatever these are, and start in milliseconds. Nothing in
the parent opens a database: a fork would share the connection.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import msgspec

from onceward.errors import ConfigurationError
from onceward.verify.intrusions import is_users

# A watchdog in each child: what takes too long is named, with the stack of whoever is in it.


HUNG = "hung"
FALLBACK = 3.0
"""Seconds later a watchdog that needs no interpreter lock writes the stacks, in case this one gets none."""
PREPARING = 60.0
"""Seconds for what is the kit's own work: connecting, copying a database, reading it."""
_LOOK_EVERY = 0.05
_PROBE = f'  File "{Path(__file__).parent / "faults.py"}"'
"""Where a stack leaves the handler."""
BEGINNING = "_live_in_child"
"""The function that a child begins with."""


class Watchdog:
    """Ends the process when the work of the moment takes longer than `timeout`."""

    def __init__(self, tell: Callable[[tuple[str, Any]], None], timeout: float, stack_file: IO[str]) -> None:
        self._tell = tell
        self._timeout = timeout
        self._file = stack_file
        self._doing = "making ready"
        self.coroutine: Coroutine[Any, Any, Any] | None = None
        """Of the handler that runs now, in asyncio: what waits there is on no thread's stack."""

    def start(self) -> None:
        self.pet(self._doing, PREPARING)
        threading.Thread(target=self._watch, name="onceward-watchdog", daemon=True).start()

    def pet(self, doing: str, seconds: float | None = None) -> None:
        """A new piece of work begins."""
        self._doing = doing
        limit = self._timeout if seconds is None else seconds
        self._due = time.monotonic() + limit
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{doing}\n")
        self._file.flush()
        faulthandler.dump_traceback_later(limit + FALLBACK, file=self._file, exit=True)

    def _watch(self) -> None:
        while time.monotonic() < self._due:
            time.sleep(_LOOK_EVERY)
        self._tell((HUNG, (self._doing, self._stack())))
        os._exit(1)

    def _stack(self) -> str:
        if self.coroutine is not None:
            return "".join(_of_coroutine(self.coroutine))
        own = threading.get_ident()
        stacks = [list(_outwards(frame)) for thread, frame in sys._current_frames().items() if thread != own]
        told = [_of_thread(stack) for stack in stacks if any(map(is_users, stack))]
        return "\n".join(told or map(_of_thread, stacks))


def told_by_fallback(written: str) -> tuple[str, str] | None:
    """What was being done, and the stacks, if the fallback had to write them; innermost frames come first."""
    doing, _, stacks = written.partition("\n")
    if not stacks:
        return None
    threads = stacks.split("\n\n")
    inside = [thread.partition(_PROBE)[0] for thread in threads if _PROBE in thread]
    return doing, "\n\n".join(inside or threads)


def _of_thread(frames: list[FrameType]) -> str:
    """From the user's outermost frame on: what called it is the kit and the engine."""
    while len(frames) > 1 and not is_users(frames[-1]):
        frames.pop()
    summary = traceback.StackSummary.extract((each, each.f_lineno) for each in reversed(frames))
    return "".join(summary.format())


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Up to the child's beginning: beyond it is whoever asked for the verification."""
    while frame is not None and frame.f_code.co_name != BEGINNING:
        yield frame
        frame = frame.f_back


def _of_coroutine(coroutine: Any) -> Iterator[str]:
    """Down the chain of what awaits what."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield from traceback.StackSummary.extract([(frame, frame.f_lineno)]).format()
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


class Hung(Exception):
    """Something in the child did not come to an end. `stack` says where it was."""

    def __init__(self, doing: str, stack: str) -> None:
        super().__init__(doing)
        self.doing = doing
        self.stack = stack


class Died(Exception):
    """The child ended without an answer, though nobody killed it."""


class Broken(Exception):
    """The kit itself failed, or something it was given."""


class Ended(msgspec.Struct, frozen=True):
    """How a child ended."""

    answer: tuple[str, Any] | None
    status: int
    stack: str

    @property
    def was_killed(self) -> bool:
        return (
            self.answer is None and os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL
        )

    def value(self) -> Any:
        """What the work returned; raises for everything else."""
        if self.answer is None:
            hung = told_by_fallback(self.stack)
            if hung is not None:
                raise Hung(*hung)
            raise Died(f"the process ended by itself, with {os.waitstatus_to_exitcode(self.status)}")
        kind, value = self.answer
        if kind == HUNG:
            raise Hung(*value)
        if kind == "configuration":
            raise ConfigurationError(value)
        if kind == "broken":
            raise Broken(value)
        return value


class Child:
    """One process that does one piece of work and says what came of it."""

    def __init__(self, work: Callable[[Watchdog], Any], timeout: float) -> None:
        self._stack = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `ended`
        self._pipe, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of forking beside threads. What they might hold, the child does not touch.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            self._live_in_child(work, write, timeout)
        os.close(write)

    def _live_in_child(self, work: Callable[[Watchdog], Any], pipe: int, timeout: float) -> NoReturn:
        watchdog = Watchdog(lambda answer: _answer(pipe, answer), timeout, self._stack)
        code = 1
        try:
            _settle_in()
            random.seed()  # or else every child would draw what its siblings draw
            watchdog.start()
            answer: tuple[str, Any] = ("done", work(watchdog))
            _answer(pipe, answer)
            code = 0
        except ConfigurationError as error:
            _answer(pipe, ("configuration", str(error)))
        except BaseException:  # noqa: BLE001  it is told to the parent, and the process ends
            _answer(pipe, ("broken", traceback.format_exc()))
        finally:
            # Not as usual: nothing of the parent's may be flushed, closed or run at exit a second time.
            os._exit(code)

    def ended(self) -> Ended:
        """Wait for its end."""
        try:
            with os.fdopen(self._pipe, "rb") as pipe:
                told = pipe.read()
            _, status = os.waitpid(self.pid, 0)
        except BaseException:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        with self._stack as file:
            file.seek(0)
            stack = file.read()
        try:
            answer = pickle.loads(told) if told else None
        except (EOFError, pickle.UnpicklingError):  # killed while it answered
            answer = None
        return Ended(answer, status, stack)


def _settle_in() -> None:
    """Nothing of the parent's goes on here: neither its event loop, nor its signal handlers, nor its output. Failures
    are meant: logs and prints of a hundred runs would hide what was found."""
    asyncio._set_running_loop(None)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)


def _answer(pipe: int, answer: tuple[str, Any]) -> None:
    try:
        told = pickle.dumps(answer)
    except Exception:  # noqa: BLE001  what a stranger's object does
        told = pickle.dumps(("broken", f"what was found cannot be handed over: {traceback.format_exc()}"))
    view = memoryview(told)
    while view:
        view = view[os.write(pipe, view) :]


def in_child(work: Callable[[Watchdog], Any], timeout: float) -> Ended:
    return Child(work, timeout).ended()


def at_once(works: Sequence[Callable[[Watchdog], Any]], timeout: float) -> list[Ended]:
    """In a process each, which begin together as soon as all are there."""
    gate, start = os.pipe()

    def begin(work: Callable[[Watchdog], Any]) -> Callable[[Watchdog], Any]:
        def waiting(watchdog: Watchdog) -> Any:
            os.close(start)
            os.read(gate, 1)  # until the parent, and all that were forked since, have closed the other end
            return work(watchdog)

        return waiting

    try:
        children = [Child(begin(work), timeout) for work in works]
    finally:
        os.close(start)
    try:
        return [child.ended() for child in children]
    finally:
        os.close(gate)
