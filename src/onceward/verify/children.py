"""Child processes: all user code runs in one, so it may hang, die or leave traces in memory.

Children are forked: they inherit the consumer and its events, picklable or not, and start in milliseconds. The parent
never opens a database, because a fork would share the connection. Each child has a watchdog, which ends work that takes
too long and reports its stack.

A child first shows that it can use SQLite: see `onceward._process.usable_fork`. One that cannot has run nothing yet,
and is forked again.
"""

from __future__ import annotations

import asyncio
import encodings.ascii  # noqa: F401  every child reads a file with it
import faulthandler
import gc
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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import msgspec

from onceward._process.usable_fork import UNUSABLE, USABLE_WITHIN, fork_beside_threads, use_sqlite_or_end
from onceward.errors import ConfigurationError
from onceward.verify.watch import background, inheritance, intrusions, outbound, traffic
from onceward.verify.watch.intrusions import is_user_code

HUNG = "hung"
FALLBACK = 3.0
"""Seconds after the watchdog until faulthandler writes the stacks: it works even if the GIL is never released."""
PREPARING = 60.0
"""Seconds for the kit's own work: connecting, copying a database, reading it."""
_CHECK_EVERY = 0.05
_PROBE = f'  File "{Path(__file__).parent / "faults.py"}"'
"""Where a stack leaves the handler."""
_USABLE = b"."
ENTRY_POINT = "_run_in_child"
"""The outermost function of a child."""


class Watchdog:
    """Ends the process when the current piece of work takes longer than `timeout`."""

    def __init__(
        self, report: Callable[[tuple[str, Any]], None], timeout: float, stack_file: IO[str]
    ) -> None:
        self._report = report
        self._timeout = timeout
        self._file = stack_file
        self._doing = ""
        """What to say of the current piece of work if it does not end."""
        self.coroutine: Coroutine[Any, Any, Any] | None = None
        """The running handler's, in asyncio: while it waits, it is on no thread's stack."""

    def start(self) -> None:
        self.pet("preparing", PREPARING)
        threading.Thread(target=self._watch, name="onceward-watchdog", daemon=True).start()

    def pet(self, doing: str, seconds: float | None = None) -> None:
        """Begin a new piece of work."""
        limit = self._timeout if seconds is None else seconds
        self._doing = f"{doing} did not finish within {limit:g} s"
        self._due = time.monotonic() + limit
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{self._doing}\n")
        self._file.flush()
        faulthandler.dump_traceback_later(limit + FALLBACK, file=self._file, exit=True)

    def _watch(self) -> None:
        while time.monotonic() < self._due:
            time.sleep(_CHECK_EVERY)
        self._report((HUNG, (self._doing, self._stack())))
        os._exit(1)

    def _stack(self) -> str:
        if self.coroutine is not None:
            return "".join(_format_coroutine(self.coroutine))
        own = threading.get_ident()
        stacks = [list(_outwards(frame)) for thread, frame in sys._current_frames().items() if thread != own]
        users = [_format_thread(stack) for stack in stacks if any(map(is_user_code, stack))]
        return "\n".join(users or map(_format_thread, stacks))


def parse_fallback(written: str) -> tuple[str, str] | None:
    """What did not end and the stacks, innermost frames first, if the fallback wrote them; otherwise None."""
    doing, _, stacks = written.partition("\n")
    if not stacks:
        return None
    threads = stacks.split("\n\n")
    inside = [thread.partition(_PROBE)[0] for thread in threads if _PROBE in thread]
    return doing, "\n\n".join(inside or threads)


def _format_thread(frames: list[FrameType]) -> str:
    """The stack from the user's outermost frame on; its callers are the kit and the engine."""
    while len(frames) > 1 and not is_user_code(frames[-1]):
        frames.pop()
    summary = traceback.StackSummary.extract((each, each.f_lineno) for each in reversed(frames))
    return "".join(summary.format())


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames up to the child's entry point; beyond it are the parent's, which it inherited."""
    while frame is not None and frame.f_code.co_name != ENTRY_POINT:
        yield frame
        frame = frame.f_back


def _format_coroutine(coroutine: Any) -> Iterator[str]:
    """The lines of its stack, along the chain of awaits."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield from traceback.StackSummary.extract([(frame, frame.f_lineno)]).format()
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


class Hung(Exception):
    """Work in the child did not finish in time: `what` names it and its limit, `stack` shows where it was."""

    def __init__(self, what: str, stack: str) -> None:
        super().__init__(what)
        self.what = what
        self.stack = stack


class Died(Exception):
    """The child exited without an answer, and the kit did not kill it."""


class Broken(Exception):
    """The kit itself failed, or one of its arguments."""


class ChildExit(msgspec.Struct, frozen=True):
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
        """What the work returned; raises `Hung`, `Died`, `Broken` or `ConfigurationError` if it did not return."""
        if self.answer is None:
            hung = parse_fallback(self.stack)
            if hung is not None:
                raise Hung(*hung)
            raise Died(f"exited unexpectedly with code {os.waitstatus_to_exitcode(self.status)}")
        return value_of(self.answer)


def value_of(answer: tuple[str, Any]) -> Any:
    """What the work returned, from the answer of its process; raises if it did not return."""
    kind, value = answer
    if kind == HUNG:
        raise Hung(*value)
    if kind == "configuration":
        raise ConfigurationError(value)
    if kind == "broken":
        raise Broken(value)
    return value


class ChildProcess:
    """A process that does one piece of work and reports its outcome."""

    def __init__(self, work: Callable[[Watchdog], Any], timeout: float) -> None:
        self._stack = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `wait`
        sys.stdout.flush()
        sys.stderr.flush()
        if not any(self._fork(work, timeout, limit) for limit in USABLE_WITHIN):
            self._stack.close()
            raise Broken(UNUSABLE)

    def _fork(self, work: Callable[[Watchdog], Any], timeout: float, limit: float) -> bool:
        """Start the process; return whether it can use SQLite. If not, it has ended."""
        self._pipe, write = os.pipe()
        with fork_beside_threads():
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            self._run_in_child(work, write, timeout, limit)
        os.close(write)
        usable = b""
        try:
            usable = os.read(self._pipe, len(_USABLE))
        finally:
            if not usable:
                os.close(self._pipe)
                os.kill(self.pid, signal.SIGKILL)  # if reading was interrupted
                os.waitpid(self.pid, 0)
        return bool(usable)

    def _run_in_child(
        self, work: Callable[[Watchdog], Any], pipe: int, timeout: float, limit: float
    ) -> NoReturn:
        watchdog = Watchdog(lambda answer: _answer(pipe, answer), timeout, self._stack)
        code = 1
        try:
            use_sqlite_or_end(limit)
            os.write(pipe, _USABLE)
            detach_from_parent()
            watch()
            random.seed()  # otherwise all children would draw the same numbers
            watchdog.start()
            answer: tuple[str, Any] = ("done", work(watchdog))
            _answer(pipe, answer)
            code = 0
        except ConfigurationError as error:
            _answer(pipe, ("configuration", str(error)))
        except BaseException:  # noqa: BLE001  reported to the parent; the process ends
            _answer(pipe, ("broken", traceback.format_exc()))
        finally:
            # A normal exit would flush, close and run the parent's exit handlers a second time.
            os._exit(code)

    def wait(self) -> ChildExit:
        """Wait until the process ends."""
        try:
            with os.fdopen(self._pipe, "rb") as pipe:
                data = pipe.read()
            _, status = os.waitpid(self.pid, 0)
        except BaseException:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        with self._stack as file:
            file.seek(0)
            stack = file.read()
        try:
            answer = pickle.loads(data) if data else None
        except (EOFError, pickle.UnpicklingError):  # killed while it answered
            answer = None
        return ChildExit(answer, status, stack)


def run_in_child(work: Callable[[Watchdog], Any], timeout: float) -> ChildExit:
    return ChildProcess(work, timeout).wait()


def run_at_once(works: Sequence[Callable[[Watchdog], Any]], timeout: float) -> list[ChildExit]:
    """Run each work in its own process; they start together once all processes exist."""
    gate, start = os.pipe()

    def begin(work: Callable[[Watchdog], Any]) -> Callable[[Watchdog], Any]:
        def waiting(watchdog: Watchdog) -> Any:
            os.close(start)
            os.read(gate, 1)  # until the parent and all later children have closed the other end
            return work(watchdog)

        return waiting

    try:
        children = [ChildProcess(begin(work), timeout) for work in works]
    finally:
        os.close(start)
    try:
        return [child.wait() for child in children]
    finally:
        os.close(gate)


def detach_from_parent() -> None:
    """Drop the parent's event loop, signal handlers and output.

    Scenarios provoke failures: the logs and prints of a hundred runs would hide the findings.
    """
    gc.freeze()  # the parent's objects stay: looking through them would copy all of its memory
    asyncio._set_running_loop(None)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)


def preload() -> None:
    """Import in the parent what every child needs."""
    outbound.preload()
    traffic.preload()
    inheritance.preload()


def watch() -> None:
    """Send nothing, and note outside calls, from now on."""
    inheritance.install()
    outbound.install()
    background.install()
    traffic.install()
    intrusions.install()


def _answer(pipe: int, answer: tuple[str, Any]) -> None:
    try:
        data = pickle.dumps(answer)
    except Exception:  # noqa: BLE001  user objects may raise anything
        data = pickle.dumps(
            ("broken", f"the result cannot be sent to the parent process: {traceback.format_exc()}")
        )
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]
