"""Threads of a simulated process: greenlets, of which one runs at a time, until it waits or the seed lets another run.

What the blocking code waits by is replaced: locks, events, queues, sleeps, and the wires of what it calls. A switch
happens only there, so a race between two lines without any of them is not found.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar
from random import Random
from types import SimpleNamespace
from typing import Any, Self, TypeVar
from unittest.mock import patch

from sqlalchemy.util import await_only, greenlet_spawn

from tests.simulation.loop import SimulatedLoop, enter, here

T = TypeVar("T")

SWITCHES = 0.15
"""How often a thread lets others run where it need not."""

_this: ContextVar[SimulatedThread | None] = ContextVar("simulated_thread", default=None)


class ProcessDead(BaseException):
    """The code of a killed process, which runs once more only to be forgotten."""


def block(awaitable: Awaitable[T]) -> T:
    """Wait in a simulated thread, while others run."""
    process = here()
    if not process.alive:
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise ProcessDead
    asyncio._set_running_loop(process.loop)
    try:
        return await_only(awaitable)
    finally:
        if process.alive:
            asyncio._set_running_loop(None)


async def run_thread(target: Callable[[], T]) -> T:
    """Run a function that blocks, as if in a thread: it sees no event loop."""
    loop, process = asyncio.get_running_loop(), here()

    def body() -> T:
        asyncio._set_running_loop(None)
        try:
            return target()
        finally:
            if process.alive:
                asyncio._set_running_loop(loop)

    return await greenlet_spawn(body)


class SimulatedThread:
    _numbers = itertools.count(1)

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] = lambda: None,
        name: str = "",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool = False,
    ) -> None:
        self.name = name
        self.daemon = daemon
        self.ident = next(self._numbers)
        self._call = lambda: target(*args, **(kwargs or {}))
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        process = here()
        context = Context()
        context.run(enter, process)
        context.run(_this.set, self)
        self._task = process.loop.create_task(run_thread(self._call), context=context)

    async def ended(self) -> None:
        """Wait for its end, and raise what it raised."""
        assert self._task is not None
        await self._task

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and not self._task.done():
            block(asyncio.wait([self._task], timeout=timeout))


class Lock:
    def __init__(self) -> None:
        self._owner: object = None
        self._depth = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    reentrant = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        switch_perhaps()
        is_ours = self.reentrant and self._owner is _this.get()
        if self._depth and not is_ours and not (blocking and self._wait(timeout)):
            return False
        self._owner = _this.get()
        self._depth += 1
        return True

    def _wait(self, timeout: float) -> bool:
        return _wait_until(self._waiting, lambda: not self._depth, timeout)

    def release(self) -> None:
        self._depth -= 1
        _wake(self._waiting)

    def locked(self) -> bool:
        return bool(self._depth)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else here().loop.time() + timeout
        while not predicate():
            left = -1.0 if until is None else until - here().loop.time()
            if until is not None and left <= 0:
                return False
            woken = here().loop.create_future()
            self._waiting.append(woken)
            self._lock.release()
            block(asyncio.wait([woken], timeout=None if until is None else left))
            self._lock.acquire()
        return True

    def notify_all(self) -> None:
        _wake(self._waiting)

    notify = notify_all


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        _wake(self._waiting)
        switch_perhaps()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        switch_perhaps()
        return self._is_set or _wait_until(
            self._waiting, lambda: self._is_set, -1.0 if timeout is None else timeout
        )


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        _wake(self._waiting)
        switch_perhaps()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        switch_perhaps()
        if not self._items and not (
            block
            and _wait_until(self._waiting, lambda: bool(self._items), -1.0 if timeout is None else timeout)
        ):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(False)


def _wait_until(waiting: deque[asyncio.Future[None]], is_true: Callable[[], bool], timeout: float) -> bool:
    """Wait, without end if the timeout is negative."""
    loop = here().loop
    until = None if timeout < 0 else loop.time() + timeout
    while not is_true():
        if until is not None and until <= loop.time():
            return False
        woken = loop.create_future()
        waiting.append(woken)
        block(asyncio.wait([woken], timeout=None if until is None else until - loop.time()))
    return True


def _wake(waiting: deque[asyncio.Future[None]]) -> None:
    while waiting:
        woken = waiting.popleft()
        if not woken.done():
            woken.set_result(None)


_random: Random = Random(0)


def switch_perhaps() -> None:
    """Let other threads run, if the seed says so."""
    if _this.get() is not None and here().alive and _random.random() < SWITCHES:
        block(asyncio.sleep(_random.choice((0.0, 0.0, 1e-4, 0.02))))


_MODULES = (
    "onceward.task.call",
    "onceward.task.cancellation",
    "onceward.task.ports_threads",
    "onceward.task.slots",
    "onceward.task.source",
    "onceward.task.groups.turns",
    "onceward.inbox.attempts",
    "onceward.inbox.effects",
    "onceward.storage.database",
    "onceward.connectors.batches",
    "onceward.outbox.relay",
    "onceward.outbox.sinks",
)


@contextmanager
def installed(loop: SimulatedLoop, random: Random) -> Iterator[None]:
    """Let the code of onceward that runs in threads use these."""
    main = SimulatedThread(name="main")
    threads = SimpleNamespace(
        Thread=SimulatedThread,
        Lock=Lock,
        RLock=RLock,
        Condition=Condition,
        Event=Event,
        get_ident=lambda: (_this.get() or main).ident,
        current_thread=_this.get,
        main_thread=lambda: main,
    )
    queues = SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)
    clocks = SimpleNamespace(
        monotonic=loop.time,
        perf_counter=loop.time,
        time=lambda: here().clock(),
        time_ns=lambda: int(here().clock() * 1e9),
        sleep=lambda seconds: block(asyncio.sleep(seconds)),
    )
    global _random
    _random = random
    with ExitStack() as patches:
        for name in _MODULES:
            module = __import__(name, fromlist=["threading"])
            for part, value in (("threading", threads), ("queue", queues), ("time", clocks)):
                if getattr(module, part, None) in (threading, queue, __import__("time")):
                    patches.enter_context(patch.object(module, part, value))
        yield
