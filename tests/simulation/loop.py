"""An event loop with virtual time and several simulated processes, in one thread.

Callbacks of one process run in the order of asyncio. Which process is next is drawn at random, and time advances when
none has anything to do. A killed process runs nothing any more, not even a `finally`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from random import Random
from typing import Any, ClassVar

START = 1_790_000_000.0
"""What the clocks show at the beginning: seconds since 1970."""

_here: ContextVar[Process | None] = ContextVar("simulated_process", default=None)


class Process:
    """A simulated process. `skew` is how far its clock is off."""

    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.stopped = False
        """As by SIGSTOP."""
        self.mortal = True
        """Whether it may die by chance."""
        self.skew = 0.0
        self.cut_off: set[str] = set()
        """The services it cannot reach."""
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.context = copy_context()
        self.context.run(_here.set, self)
        self.last_wishes: list[Callable[[], object]] = []
        """What the operating system does when it dies, such as closing its files."""
        self.own: dict[str, Any] = {}
        """State that is global in a real process."""

    def clock(self) -> float:
        return START + self.loop.time() + self.skew

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine, context=self.context)

    def __repr__(self) -> str:
        return self.name


def here() -> Process:
    """The process that is running. Code may run in a context of its own, as in a new thread."""
    process = _here.get(None) or SimulatedLoop.running
    assert process is not None
    return process


def enter(process: Process) -> None:
    """Let what runs in this context belong to the process."""
    _here.set(process)


MOST_STEPS = 60_000
"""Far more than any run needs: one that takes so many spins."""


class Endless(Exception):
    """The simulation does not come to its end: nothing happens any more, or always the same."""


class SimulatedLoop(asyncio.BaseEventLoop):
    running: ClassVar[Process | None] = None
    """Whose callback runs."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._now = 0.0
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._processes: list[Process] = []
        self._dead: list[asyncio.Task[Any]] = []
        """Kept until the end, so nothing of them is cleaned up."""
        self.outlived: set[Any] = set()
        """Stands for `onceward.task.ports_asyncio._outliving`."""
        self.steps = 0
        self.set_task_factory(self._make_task)

    def process(self, name: str) -> Process:
        made = Process(self, name)
        self._processes.append(made)
        return made

    def kill(self, process: Process) -> None:
        """End a process as `kill -9` does. Idempotent."""
        if not process.alive:
            return
        process.alive = False
        process.ready.clear()
        self._processes.remove(process)
        self._dead += process.tasks
        for wish in process.last_wishes:
            wish()

    def bury(self) -> None:
        """Forget all processes, at the end."""
        for process in list(self._processes):
            self.kill(process)
        self.set_exception_handler(lambda *_: None)
        for task in [*self._dead, *self.outlived]:
            _abandon(task)
        self._timers.clear()
        self._dead.clear()
        self.outlived.clear()
        self.close()

    # ── what asyncio calls ──────────────────────────────────────────────────────────────────────────────

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._make_ready(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> asyncio.Future[Any]:
        """Run it here and now: a thread would not be deterministic."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when its time comes."""

    def _make_task(self, loop: Any, coroutine: Any, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
        process = (context or copy_context()).get(_here) or SimulatedLoop.running
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
        return task

    def _make_ready(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_here)  # type: ignore[attr-defined]
        if process is None:
            process = SimulatedLoop.running or self._processes[0]
        if process.alive:
            process.ready.append(handle)

    def _run_once(self) -> None:
        able = [each for each in self._processes if each.ready and not each.stopped]
        if not able:
            self._advance()
            return
        process = able[0] if len(able) == 1 else self._random.choice(able)
        handle = process.ready.popleft()
        if not handle.cancelled():
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise Endless(f"it does not come to an end in {MOST_STEPS} steps")
            SimulatedLoop.running = process
            try:
                handle._run()
            finally:
                SimulatedLoop.running = None

    def _advance(self) -> None:
        """Let all that is due next be ready. What belongs to a stopped process waits until that continues."""
        while self._timers and self._timers[0][2].cancelled():
            heappop(self._timers)
        if not self._timers:
            raise Endless("nothing is going to happen any more")
        self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            handle = heappop(self._timers)[2]
            if not handle.cancelled():
                self._make_ready(handle)


def _abandon(task: asyncio.Task[Any]) -> None:
    """End the coroutine of a killed process now: later, when the interpreter exits, it could do harm."""
    for _ in range(10):
        try:
            task.get_coro().close()  # type: ignore[union-attr]
            return
        except BaseException:  # it waits again while it cleans up
            continue


@contextmanager
def collected() -> Iterator[None]:
    """Around one run: what is left of it is collected at its end, and never in the middle of another, where its code
    would run."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """Around runs: coroutines of killed processes complain that they cannot clean up, when they are collected."""
    complain = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    gc.freeze()  # what is there already need not be looked at again and again
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            gc.collect()
    finally:
        gc.unfreeze()
        sys.unraisablehook = complain
