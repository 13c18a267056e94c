"""The engine's ports in asyncio.

Workers are tasks. A life runs inside its worker's task, but in its own context, so a transaction does not cost a
task. User code may leave a count of `Task.cancelling` behind, as `asyncio.TaskGroup` of 3.11 does; so
`AsyncPorts.is_cancelled` says whether a call was canceled, and each attempt starts with a clean task.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from math import inf
from time import monotonic
from types import CoroutineType, coroutine
from typing import TYPE_CHECKING, Any

from onceward._functions import check_awaitable
from onceward._process.stacks import coroutine_stack
from onceward.backoff import LONGEST_SLEEP
from onceward.task.attempts.brief_lives import async_attempt, brief_poll
from onceward.task.attempts.first_attempts import Opened
from onceward.task.deadlines import Clock, Deadlines, RunningAttempt, TaskTry, first_limit, is_too_late
from onceward.task.groups.ports import AsyncGroupPorts
from onceward.task.groups.together import WAIT
from onceward.task.lifecycle import early_outcome, live
from onceward.task.script import (
    DISOWNED,
    Closed,
    EngineTask,
    Exited,
    Failed,
    Script,
    TimeLimit,
    await_checked,
    await_in_context,
    drive_async,
    failure_reply,
    release,
)
from onceward.task.work import Life, Work
from onceward.telemetry.context import current_attempt
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.task.slots import Item, Slots

TURN = 0.002
"""Seconds that handlers which never wait may run until the rest of the event loop has its turn."""
PASSES = 3
"""How often the event loop goes round in that turn: a timer or socket wakes a future, that a task, and it runs."""
PARTING = 2.0
"""Seconds that dismissed workers have to end. They need far less, unless the engine has failed."""

_outliving: set[asyncio.Task[Any]] = set()
"""The engine's tasks; the event loop holds only weak references to them."""


class AsyncPorts(AsyncGroupPorts):
    """Ports of one call, bound to the running event loop."""

    def __init__(
        self, clock: Clock, stuck_grace: float, on_expiry: Callable[[Work, TimeLimit], None]
    ) -> None:
        self.interruptible = False
        """Whether attempts without a time limit can be cut off too: see `BaseTask.hurry`."""
        self.now = clock.now
        self.sleeping = clock.sleeping
        self.deadlines = Deadlines(stuck_grace, on_expiry, self.make_try)
        self.tries = self.deadlines.tries
        self.forgive = self.deadlines.forgive  # because telemetry holds up the event loop
        self._timer: asyncio.TimerHandle | None = None
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._items: deque[Item] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._rousing = False
        self._mail = False
        self._parked: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.soiled: set[asyncio.Task[Any]] = set()
        self._reserve: deque[Script[None]] = deque()
        """Workers that have not started."""
        self._turn_ends = 0.0
        self.in_a_row = False
        """A worker polls right after a life that did not wait."""
        self._giving_turn = False
        """A worker lets the rest of the event loop have its turn; no other starts work meanwhile."""
        self.ending = False
        self._pausing: dict[asyncio.Future[None], bool] = {}
        """What waits between attempts, and whether because it is postponed."""
        self._cancelled = False
        self._caller = asyncio.current_task()
        self._caller_count = 0 if self._caller is None else self._caller.cancelling()
        self.on_crash: Callable[[BaseException], None]

    # ── lives ───────────────────────────────────────────────────────────────────────────────────────────

    def invoke(
        self, work: Work, call: Callable[..., Any], arguments: tuple[Any, ...], timeout: float | None
    ) -> Any:
        if timeout is None and work.deadline == inf and not (self.interruptible or self.soiled):
            try:
                reply = call(*arguments)
            except BaseException as error:  # noqa: BLE001  an error of user code is a reply
                return failure_reply(error)
            # The driver awaits it and turns its error into a reply: one coroutine less.
            return reply if type(reply) is CoroutineType else await_checked(reply, call)
        return self._invoke_limited(work, call, arguments, timeout)

    async def _invoke_limited(
        self, work: Work, call: Callable[..., Any], arguments: tuple[Any, ...], timeout: float | None
    ) -> Any:
        task = asyncio.current_task(self.loop)
        assert task is not None
        if self.soiled and task in self.soiled:
            await self._clean(task)
        if self.deadlines.hurried and type(work) is Life:
            return self.deadlines.refuse(work)
        due, limit = work.deadline, work.limit
        now = 0.0
        if timeout is not None or due != inf:
            now = self.now()
            due, limit = first_limit(work, timeout, now)
            if is_too_late(work, due, limit, now):
                return Failed(None, limit)
        reply: Any = None
        error: BaseException | None = None
        self.tries[task] = this = TaskTry(work=work, due=due, limit=limit, task=task)
        current_attempt.set(this)
        if due < self.deadlines.watch_at:  # so it is not infinite, and `now` is set
            self._watch_from(due, now)
        try:
            this.awaited = awaited = call(*arguments)
            reply = await (awaited if type(awaited) is CoroutineType else check_awaitable(awaited, call))
        except BaseException as raised:  # noqa: BLE001
            error = raised
        return self.conclude(this, reply, error)

    def is_cancelled(self, task: asyncio.Task[Any]) -> bool:
        """Whether the task has to end because the call was canceled, or everything there is."""
        if task in self._tasks:
            caller = self._caller
            return self._cancelled or (caller is not None and caller.cancelling() > self._caller_count)
        return task.cancelling() > 0

    def failure_reply(self, error: BaseException) -> Failed:
        """Make a reply of an error of user code, but raise the cancellation of the call."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and self.is_cancelled(task):
                raise error
        return failure_reply(error)

    async def _clean(self, task: asyncio.Task[Any]) -> None:
        """Forget what earlier user code has done to this task."""
        self.soiled.discard(task)
        while task.cancelling():
            task.uncancel()
        try:
            await asyncio.sleep(0)  # a cancellation that is still pending arrives now
        except asyncio.CancelledError as error:
            self.failure_reply(error)

    def _check_deadlines(self) -> None:
        """The watchdog: runs on a timer set for the earliest deadline."""
        now = self.now()
        try:
            nearest = self.deadlines.check(now)
        except Exception as error:  # noqa: BLE001  other attempts still need their watchdog
            self.on_crash(error)
            nearest = self.deadlines.check(now)
        if nearest != inf:
            self._watch_from(nearest, now)

    def _watch_from(self, due: float, now: float) -> None:
        # Always by a timer: cancelling the running task would hit the wrong place.
        if self._timer is not None:
            self._timer.cancel()
        self.deadlines.watch_at = due
        self._timer = self.loop.call_later(min(max(due - now, 0.0), LONGEST_SLEEP), self._check_deadlines)

    def brief_poll(self, slots: Slots) -> Callable[[], Any]:
        return brief_poll(slots, self, async_attempt(slots, self))

    def attempts(self) -> list[RunningAttempt]:
        return self.deadlines.attempts(lambda this: coroutine_stack(this.awaited, self._thread))

    def hurry(self) -> None:
        self._call_soon(self._hurry_now)

    def _hurry_now(self) -> None:
        self.deadlines.hurry()
        self.interruptible = True  # attempts are refused where they would be limited
        self.end_postponements()
        self._check_deadlines()

    def end_postponements(self) -> None:
        self.ending = True
        for waiter, postponed in self._pausing.items():
            if postponed or self.deadlines.hurried:
                release(waiter)

    @coroutine
    def pause(self, work: Work, seconds: float, postponed: bool) -> Generator[Any, Any, Any]:
        if seconds <= 0:
            for _ in range(PASSES):  # other tasks of the event loop need their turn
                yield
            return
        real = self.sleeping(max(min(seconds, work.deadline - self.now()), 0.0))
        until = self.loop.time() + min(real, LONGEST_SLEEP)
        while until > self.loop.time() and not (self.ending if postponed else self.deadlines.hurried):
            waiter: asyncio.Future[None] = self.loop.create_future()
            timer = self.loop.call_at(until, release, waiter)
            self._pausing[waiter] = postponed
            try:
                yield from waiter
                return
            except asyncio.CancelledError as error:
                self.failure_reply(error)
            finally:
                timer.cancel()
                del self._pausing[waiter]

    def enter(self, life: Life) -> Any:
        """Return the outcome of a life that need not wait; otherwise a generator to await."""
        try:
            reply = self.open(life)
            if type(reply) is Opened:
                return self.wait_for(life, reply)
            if type(reply) is CoroutineType:
                try:
                    awaited = life.context.run(reply.send, None)
                    if self._items:
                        self._rouse_all()
                    return self.go_on(life, reply, awaited)
                except StopIteration as end:
                    reply = end.value
                except BaseException as error:  # noqa: BLE001  an error of user code is a reply
                    reply = self.failure_reply(error)
            outcome = early_outcome(life, reply)
            if outcome is None:
                return self.go_on(life, None, reply)
            self.in_a_row = True
            return outcome
        except BaseException as error:  # noqa: BLE001  reported as an exit; the loop raises it
            return Exited(error)

    def go_on_from(self, life: Life, reply: Any) -> Any:
        return self.wait_for(life, reply) if type(reply) is Opened else self.finish(life, reply)

    def wait_for(self, life: Life, opened: Opened) -> Any:
        """As `enter`, once the first attempt has to wait."""
        if self._items:
            self._rouse_all()
        return self.go_on(life, opened.following, opened.awaited)

    @coroutine
    def go_on(
        self, life: Life, opened: Coroutine[Any, Any, Any] | None, reply: Any
    ) -> Generator[Any, Any, Any]:
        """Go on to the outcome: from the reply of the first attempt, or from within it (`opened`), awaiting `reply`."""
        run = life.context.run
        try:
            if opened is not None:
                try:
                    reply = yield from await_in_context(run, opened, reply)
                except Closed:
                    raise
                except BaseException as error:  # noqa: BLE001
                    reply = self.failure_reply(error)
                if reply is DISOWNED:
                    return None
                outcome = early_outcome(life, reply)
                if outcome is not None:
                    return outcome
            life.script = live(life, self, reply)
            result = yield from await_in_context(run, drive_async(life.script, None, self.failure_reply))
            self.in_a_row = True  # perhaps: none of its steps had to wait
        except Closed:
            raise
        except BaseException as error:  # noqa: BLE001
            return Exited(error)
        return None if result is DISOWNED else result

    @coroutine
    def enter_script(self, work: Work, reply: Failed | None) -> Generator[Any, Any, Any]:
        try:
            assert work.script is not None
            result = yield from await_in_context(
                work.context.run, drive_async(work.script, reply, self.failure_reply)
            )
        except Closed:
            raise
        except BaseException as error:  # noqa: BLE001
            return Exited(error)
        return None if result is DISOWNED else result

    # ── slots and loop ──────────────────────────────────────────────────────────────────────────────────

    def poll(self) -> Any:
        items = self._items
        if not items:
            self.in_a_row = False  # the wait for the next item gives the rest of the event loop its turn
            return WAIT
        if self._giving_turn:
            return WAIT
        if self.in_a_row:
            self.in_a_row = False
            if monotonic() >= self._turn_ends:
                return WAIT
        item = items.popleft()
        if items and not self._rousing:
            self._rouse()
        return item

    glance = poll

    @coroutine
    def take(self) -> Generator[Any, Any, Any]:
        try:
            if self._items and not self._giving_turn:
                self._giving_turn = True
                try:
                    for _ in range(PASSES):
                        yield
                    return
                finally:
                    self._giving_turn = False
                    self._turn_ends = monotonic() + TURN
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._idle.append(waiter)
            try:
                yield from waiter
            finally:
                self._rousing = False
        except asyncio.CancelledError as error:
            self.failure_reply(error)

    def put(self, *items: Item) -> None:
        if threading.get_ident() != self._thread:
            self._call_soon(self.put, *items)
            return
        self._items.extend(items)
        if not self._rousing:
            self._rouse()

    def _rouse_all(self) -> None:
        # Work that waits runs concurrently: rouse as many workers as there are items, at once.
        for _ in range(min(len(self._items), len(self._idle) + len(self._reserve))):
            self._rouse()

    def _rouse(self) -> None:
        # One at a time, each rousing the next: a fast worker takes all items without waking others.
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                self._rousing = True
                waiter.set_result(None)
                return
        if self._reserve:
            self._rousing = True
            self.start(self._begin_work(self._reserve.popleft()))

    async def _begin_work(self, script: Script[None]) -> None:
        self._rousing = False
        await drive_async(script, None, self.failure_reply)

    def enlist(self, script: Script[None]) -> None:
        self._reserve.append(script)
        if self._items and not self._rousing:
            self._rouse()

    def dismiss(self, count: int) -> None:
        self._reserve.clear()
        self._items.extend([None] * count)
        self._rouse_all()

    def drain(self) -> list[Transaction | Life]:
        drained = [item for item in self._items if item is not None]
        self._items.clear()
        return drained

    def spawn(self, script: Script[None]) -> None:
        self.start(drive_async(script, None, self.failure_reply))

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = EngineTask(work, self.soiled)
        self._tasks.add(task)
        _outliving.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        _outliving.discard(task)
        self.soiled.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        # Canceled other than with the call: its caller must not wait for a worker that is gone.
        if error is not None and not (task.cancelled() and self._cancelled):
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
            self.loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The event loop is closed: there is nothing to wake.
            return

    @coroutine
    def park(self, seconds: float | None) -> Generator[Any, Any, None]:
        if not self._mail:
            self._parked = parked = self.loop.create_future()
            timer = None
            if seconds is not None and seconds != inf:
                timer = self.loop.call_later(min(seconds, LONGEST_SLEEP), self._wake_now)
            try:
                yield from parked
            except asyncio.CancelledError as error:
                self.failure_reply(error)
            finally:
                self._parked = None
                if timer is not None:
                    timer.cancel()
        self._mail = False

    def close(self) -> None:
        """Stop the watchdog."""
        if self._timer is not None:
            self._timer.cancel()

    async def join(self) -> None:
        """Wait for the dismissed workers. Attempts that did not end in time are not waited for."""
        ending = {task for task in self._tasks if task not in self.tries}
        if ending:
            await asyncio.wait(ending, timeout=PARTING)

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel every task of this call, and return them."""
        self._cancelled = True
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)
