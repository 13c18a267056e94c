"""The engine's ports in asyncio.

Workers are tasks. A life runs inside its worker's task, but in its own context, so a transaction does not cost a
task. All time limits share one timer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from math import inf
from types import CoroutineType, coroutine
from typing import Any

from onceward._functions import check_awaitable
from onceward.backoff import LONGEST_SLEEP
from onceward.task.deadlines import Clock, Deadlines, Try, first_limit, is_too_late
from onceward.task.exceptions import AttemptInterrupted
from onceward.task.lifecycle import early_outcome, first_attempt, live
from onceward.task.script import (
    DISOWNED,
    Exited,
    Failed,
    Limit,
    Script,
    drive_async,
    failure_reply,
    failure_reply_in_task,
)
from onceward.task.slots import WAIT, Item
from onceward.task.work import Life, Work
from onceward.telemetry.context import current_attempt
from onceward.transaction import Transaction

_outliving: set[asyncio.Task[Any]] = set()
"""The engine's tasks; the event loop holds only weak references to them."""


class TaskTry(Try):
    """An attempt in a task. The event loop runs one step at a time, so plain attributes are race-free."""

    __slots__ = ("stuck", "task")

    def __init__(self, work: Work, due: float, limit: Limit, task: asyncio.Task[Any]) -> None:
        super().__init__(work, due, limit)
        self.task = task
        self.stuck = False

    def expire(self) -> bool:
        return True

    def interrupt(self) -> None:
        self.cancel()
        self.task.cancel()

    def give_up(self) -> bool:
        self.stuck = True
        return True


class AsyncPorts:
    """Ports of one call, bound to the running event loop."""

    def __init__(self, clock: Clock, stuck_grace: float, on_expiry: Callable[[Work, Limit], None]) -> None:
        self.interruptible = False
        """Whether attempts without a time limit can be cut off too: see `BaseTask.hurry`."""
        self.now = clock.now
        self.sleeping = clock.sleeping
        self._deadlines = Deadlines(stuck_grace, on_expiry)
        self._tries = self._deadlines.tries
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._items: deque[Item] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._rousing = False
        self._mail = False
        self._parked: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.on_crash: Callable[[BaseException], None]

    # ── lives ───────────────────────────────────────────────────────────────────────────────────────────

    def invoke(
        self, work: Work, call: Callable[..., Any], arguments: tuple[Any, ...], timeout: float | None
    ) -> Any:
        if timeout is None and work.deadline == inf and not self.interruptible:
            try:
                reply = call(*arguments)
            except BaseException as error:  # noqa: BLE001  an error of user code is a reply
                return failure_reply(error)
            # The driver awaits it and turns its error into a reply: one coroutine less.
            return reply if type(reply) is CoroutineType else _await(reply, call)
        return self._invoke_limited(work, call, arguments, timeout)

    async def _invoke_limited(
        self, work: Work, call: Callable[..., Any], arguments: tuple[Any, ...], timeout: float | None
    ) -> Any:
        now = self.now()
        due, limit = first_limit(work, timeout, now)
        if is_too_late(work, due, limit, now):
            return Failed(None, limit)
        reply: Any = None
        error: BaseException | None = None
        task = asyncio.current_task()
        assert task is not None
        self._tries[task] = this = TaskTry(work, due, limit, task)
        current_attempt.set(this)
        if due < self._deadlines.watch_at:
            self._watch_from(due, now)
        try:
            reply = await check_awaitable(call(*arguments), call)
        except BaseException as raised:  # noqa: BLE001
            error = raised
        del self._tries[task]
        current_attempt.set(None)
        if this.stuck:
            return DISOWNED
        if this.expired and task.uncancel() > 0:
            # The task was also cancelled from outside.
            raise asyncio.CancelledError
        if this.expired:
            if error is None or isinstance(error, (asyncio.CancelledError, AttemptInterrupted)):
                return Failed(None, this.limit, late=reply)
            return failure_reply(error, this.limit)
        return reply if error is None else failure_reply_in_task(error)

    def _check_deadlines(self) -> None:
        """The watchdog: runs on a timer set for the earliest deadline."""
        now = self.now()
        try:
            nearest = self._deadlines.check(now)
        except Exception as error:  # noqa: BLE001  other attempts still need their watchdog
            self.on_crash(error)
            nearest = self._deadlines.check(now)
        if nearest != inf:
            self._watch_from(nearest, now)

    def _watch_from(self, due: float, now: float) -> None:
        # Always by a timer: cancelling the running task would hit the wrong place.
        if self._timer is not None:
            self._timer.cancel()
        self._deadlines.watch_at = due
        self._timer = self._loop.call_later(min(max(due - now, 0.0), LONGEST_SLEEP), self._check_deadlines)

    def hurry(self) -> None:
        self._call_soon(self._hurry_now)

    def _hurry_now(self) -> None:
        self._deadlines.hurry()
        self._check_deadlines()

    @coroutine
    def pause(self, work: Work, seconds: float) -> Generator[Any, Any, None]:
        real = self.sleeping(max(min(seconds, work.deadline - self.now()), 0.0))
        if real > 0:
            yield from asyncio.sleep(min(real, LONGEST_SLEEP)).__await__()

    def enter(self, life: Life) -> Any:
        """Return the outcome of a life that need not wait; otherwise a generator to await."""
        run = life.context.run
        try:
            reply = run(first_attempt, life, self)
            if type(reply) is CoroutineType:
                try:
                    awaited = run(reply.send, None)
                    if self._items and self._idle:
                        self._rouse_all()
                    return self._go_on(life, reply, awaited)
                except StopIteration as end:
                    reply = end.value
                except BaseException as error:  # noqa: BLE001  an error of user code is a reply
                    reply = failure_reply_in_task(error)
            return early_outcome(life, reply) or self._go_on(life, None, reply)
        except BaseException as error:  # noqa: BLE001  reported as an exit; the loop raises it
            return Exited(error)

    @coroutine
    def _go_on(
        self, life: Life, opened: CoroutineType[Any, Any, Any] | None, reply: Any
    ) -> Generator[Any, Any, Any]:
        """Go on to the outcome: from the reply of the first attempt, or from within it (`opened`), awaiting `reply`."""
        run = life.context.run
        try:
            if opened is not None:
                try:
                    reply = yield from _await_in_context(run, opened, reply)
                except _Closed:
                    raise
                except BaseException as error:  # noqa: BLE001
                    reply = failure_reply_in_task(error)
                if reply is DISOWNED:
                    return None
                outcome = early_outcome(life, reply)
                if outcome is not None:
                    return outcome
            life.script = live(life, self, reply)
            result = yield from _await_in_context(run, drive_async(life.script))
        except _Closed:
            raise
        except BaseException as error:  # noqa: BLE001
            return Exited(error)
        return None if result is DISOWNED else result

    @coroutine
    def enter_script(self, work: Work, reply: Failed | None) -> Generator[Any, Any, Any]:
        try:
            assert work.script is not None
            result = yield from _await_in_context(work.context.run, drive_async(work.script, reply))
        except _Closed:
            raise
        except BaseException as error:  # noqa: BLE001
            return Exited(error)
        return None if result is DISOWNED else result

    # ── slots and loop ──────────────────────────────────────────────────────────────────────────────────

    def poll(self) -> Any:
        items = self._items
        if not items:
            return WAIT
        item = items.popleft()
        if items and self._idle and not self._rousing:
            self._rouse()
        return item

    @coroutine
    def take(self) -> Generator[Any, Any, None]:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._idle.append(waiter)
        try:
            yield from waiter
        finally:
            self._rousing = False

    def put(self, *items: Item) -> None:
        if threading.get_ident() != self._thread:
            self._call_soon(self.put, *items)
            return
        self._items.extend(items)
        if self._idle and not self._rousing:
            self._rouse()

    def _rouse_all(self) -> None:
        # Work that waits runs concurrently: rouse as many workers as there are items, at once.
        for _ in range(min(len(self._items), len(self._idle))):
            self._rouse()

    def _rouse(self) -> None:
        # One at a time, each rousing the next: a fast worker takes all items without waking others.
        waiter = self._idle.popleft()
        if not waiter.done():
            self._rousing = True
            waiter.set_result(None)

    def drain(self) -> list[Transaction | Life]:
        drained = [item for item in self._items if item is not None]
        self._items.clear()
        return drained

    def spawn(self, script: Script[None]) -> None:
        self.start(drive_async(script))

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        _outliving.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        _outliving.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.on_crash(error)

    def wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._wake_now()
        else:
            self.alarm()

    def alarm(self) -> None:
        # A signal handler runs in the event loop's thread, but the loop may be asleep in its selector.
        self._call_soon(self._wake_now)

    def _wake_now(self) -> None:
        self._mail = True
        if self._parked is not None and not self._parked.done():
            self._parked.set_result(None)

    def _call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The event loop is closed: there is nothing to wake.
            return

    @coroutine
    def park(self, seconds: float | None) -> Generator[Any, Any, None]:
        if not self._mail:
            self._parked = parked = self._loop.create_future()
            timer = None
            if seconds is not None and seconds != inf:
                timer = self._loop.call_later(min(seconds, LONGEST_SLEEP), self._wake_now)
            try:
                yield from parked
            finally:
                self._parked = None
                if timer is not None:
                    timer.cancel()
        self._mail = False

    def close(self) -> None:
        """Stop the watchdog."""
        if self._timer is not None:
            self._timer.cancel()

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel every task of this call, and return them."""
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)


async def _await(given: Any, function: Callable[..., Any]) -> Any:
    return await check_awaitable(given, function)


_NOT_STARTED: Any = object()


class _Closed(GeneratorExit):
    """The task was closed from outside. Any other GeneratorExit comes from user code."""


def _await_in_context(
    run: Callable[..., Any], driven: Coroutine[Any, Any, Any], awaited: Any = _NOT_STARTED
) -> Generator[Any, Any, Any]:
    """Await a coroutine in the current task, but in another context. `awaited` is what it is waiting for."""
    try:
        if awaited is _NOT_STARTED:
            awaited = run(driven.send, None)
        while True:
            try:
                value = yield awaited
            except GeneratorExit as closing:
                driven.close()
                raise _Closed from closing
            except BaseException as thrown:  # noqa: BLE001  pass on what the event loop throws
                awaited = run(driven.throw, thrown)
            else:
                awaited = run(driven.send, value)
    except StopIteration as end:
        return end.value
