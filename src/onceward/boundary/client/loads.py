"""Appends of many callers in few calls: a caller that finds none under way calls at once, and those that arrive
meanwhile go together with the next call, as in the server's group commit. So nobody waits for company.

Each caller has its own outcome, and can leave at any time: the call goes on for the others. What has not been sent by
then is not sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from onceward._process.aside import Mail, hand_over, may_be_left, wait_aside
from onceward._process.stop import LAST_WAIT, engine_stop
from onceward._sync import run_blocking
from onceward.boundary.model import MOST_APPENDED

LOAD_BYTES = 60 * 1024
"""Of the facts that go together. A larger one goes alone. A server has room for messages of this size, however many
large ones arrive."""

STUCK_AFTER = 1.0
"""Seconds after which a call no longer delays the next ones: its connection may be dead."""

Outcome = Any
"""What the caller gets; an exception is raised."""
Send = Callable[[Sequence[bytes]], Coroutine[Any, Any, Sequence[Outcome]]]
"""Makes a call, and returns the outcome of each. It raises nothing that is meant for the callers."""


class Loads(Protocol):
    async def append(self, encoded: bytes) -> Outcome: ...


class Caller:
    is_waiting = False

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded


T = TypeVar("T")
C = TypeVar("C", bound=Caller)


def next_load(waiting: deque[T], bytes_of: Callable[[T], int]) -> list[T]:
    """Take what goes together next, in order."""
    load: list[T] = []
    size = 0
    while waiting and len(load) < MOST_APPENDED:
        size += bytes_of(waiting[0])
        if load and size > LOAD_BYTES:
            break
        load.append(waiting.popleft())
    return load


class AppendLine(Generic[C]):
    """Callers that wait while a call is in progress."""

    def __init__(self) -> None:
        self.waiting: deque[C] = deque()
        self.is_busy = False
        self._began = 0.0

    def lead(self) -> bool:
        """Return whether to make the next call; otherwise, `join`."""
        now = time.monotonic()
        leads = not self.is_busy or now - self._began > STUCK_AFTER
        if leads:
            self.is_busy, self._began = True, now
        return leads

    def take(self) -> list[C]:
        """Take the next load, in order; if nobody waits, the line is not busy any more."""
        load = next_load(self.waiting, lambda caller: len(caller.encoded))
        for caller in load:
            caller.is_waiting = False
        self.is_busy, self._began = bool(load), time.monotonic()
        return load

    def join(self, caller: C) -> None:
        caller.is_waiting = True
        self.waiting.append(caller)

    def leave(self, caller: C) -> None:
        if caller.is_waiting:
            self.waiting.remove(caller)


class WaitingTask(Caller):
    def __init__(self, encoded: bytes, done: asyncio.Future[Outcome]) -> None:
        super().__init__(encoded)
        self.done = done


class AsyncLoads:
    """For asyncio. Tasks of one event loop share calls."""

    def __init__(self, send: Send, timeout: float | None) -> None:
        self._send = send
        self._timeout = timeout
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, AppendLine[WaitingTask]] = (
            WeakKeyDictionary()
        )
        self._sending: set[asyncio.Task[None]] = set()

    async def append(self, encoded: bytes) -> Outcome:
        stop = engine_stop()
        return await (
            self._append(encoded) if stop is None else stop.leave(self._append, encoded, grace=LAST_WAIT)
        )

    async def _append(self, encoded: bytes) -> Outcome:
        loop = asyncio.get_running_loop()
        line = self._lines.setdefault(loop, AppendLine())
        if line.lead():
            try:
                [outcome] = await self._send((encoded,))
            finally:
                self._send_next(line, loop)
        else:
            caller = WaitingTask(encoded, loop.create_future())
            line.join(caller)
            try:
                async with asyncio.timeout(self._timeout):
                    outcome = await caller.done
            finally:
                line.leave(caller)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _send_next(self, line: AppendLine[WaitingTask], loop: asyncio.AbstractEventLoop) -> None:
        if load := line.take():
            # In a context of its own: the stop of one caller's engine does not concern the others.
            sending = loop.create_task(self._send_loads(line, load), context=Context())
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def _send_loads(self, line: AppendLine[WaitingTask], load: list[WaitingTask]) -> None:
        try:
            while load:
                outcomes: Sequence[Outcome]
                try:
                    outcomes = await self._send([caller.encoded for caller in load])
                except Exception as error:  # noqa: BLE001  every caller must get an answer
                    outcomes = [error] * len(load)
                for caller, outcome in zip(load, outcomes, strict=True):
                    if not caller.done.done():
                        caller.done.set_result(outcome)
                # Callers come back with their next facts in this turn of the loop, and those go together.
                await asyncio.sleep(0)
                load = line.take()
        except BaseException:  # the event loop ends
            line.is_busy = False
            for caller in (*load, *line.waiting):
                caller.done.cancel()
            raise


class WaitingThread(Caller):
    def __init__(self, encoded: bytes) -> None:
        super().__init__(encoded)
        self.mail: Mail = SimpleQueue()


class BlockingLoads:
    """For threads."""

    def __init__(self, send: Send, timeout: float | None) -> None:
        self._send = send
        self._timeout = timeout
        self._line: AppendLine[WaitingThread] = AppendLine()
        self._lock = threading.Lock()

    async def append(self, encoded: bytes) -> Outcome:
        stop = engine_stop()
        caller = WaitingThread(encoded)
        # Whether to make the next call. If a signal handler raises here, it is made once too often rather than never.
        leads = False
        try:
            with self._lock:
                leads = self._line.lead()
                if not leads:
                    self._line.join(caller)
            if leads and not may_be_left(stop):
                [outcome] = await self._send((encoded,))
            else:
                if leads:
                    self._send_aside([caller])
                    leads = False
                outcome = wait_aside(caller.mail, stop=stop, grace=LAST_WAIT, timeout=self._timeout)
        finally:
            with self._lock:
                self._line.leave(caller)
            if leads:
                self._send_next()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _send_next(self) -> None:
        with self._lock:
            load = self._line.take()
        if load:
            self._send_aside(load)

    def _send_aside(self, load: list[WaitingThread]) -> None:
        try:
            hand_over(partial(self._send_loads, load), SimpleQueue())
        except RuntimeError:  # no thread can be started: then in this one
            self._send_loads(load)

    def _send_loads(self, load: list[WaitingThread]) -> None:
        while load:
            try:
                outcomes = run_blocking(self._send([caller.encoded for caller in load]))
            except BaseException as error:  # noqa: BLE001  every caller must get an answer
                outcomes = [error] * len(load)
            for caller, outcome in zip(load, outcomes, strict=True):
                caller.mail.put((outcome, None))
            with self._lock:
                load = self._line.take()
