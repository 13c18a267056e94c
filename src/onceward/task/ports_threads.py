"""The engine's ports in threads.

Attempts run on the worker's thread. One watchdog thread watches all attempts that have a time limit; an attempt does
not cost a thread or a timer.

An attempt that runs out of time is asked to stop: see `onceward.task.cancellation`. Only with `interrupt="raise"` is an
exception raised in its thread. CPython delivers it when the thread next runs Python code, wherever that is. It can also
arrive after the attempt has ended, so a thread that may be interrupted calls `absorb` before it goes on.

The watchdog neither logs nor takes a lock that user code can hold: it must be able to act whatever an attempt does.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from onceward._process.stacks import thread_stack
from onceward._sync import run_blocking
from onceward.backoff import LONGEST_SLEEP
from onceward.task.attempts.brief_lives import blocking_attempt, brief_poll
from onceward.task.deadlines import (
    Clock,
    Deadlines,
    RunningAttempt,
    Try,
    first_limit,
    forget_token,
    is_too_late,
)
from onceward.task.exceptions import AttemptInterrupted
from onceward.task.groups.together import STUCK, WAIT
from onceward.task.groups.turns import BlockingTurns
from onceward.task.lifecycle import early_outcome, first_attempt, live
from onceward.task.script import DISOWNED, Exited, Failed, Script, TimeLimit, drive, failure_reply
from onceward.task.work import Life, Work
from onceward.telemetry.context import current_attempt, current_work
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.task.slots import Item, Slots

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int

_clear_async_exc = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


def raise_in(thread_ident: int) -> None:
    """Raise `AttemptInterrupted` in that thread, soon."""
    _set_async_exc(thread_ident, AttemptInterrupted)


def absorb(thread_ident: int) -> None:
    """Clear a pending interrupt of this thread, which calls this itself. May raise the interrupt."""
    _clear_async_exc(thread_ident, None)


class ThreadTry(Try, eq=False, kw_only=True):
    """An attempt in a thread.

    Thread and watchdog race with `list.append`, which is atomic and, unlike a lock, cannot be left half done by an
    exception from outside. Who is first in `ended` decides whether the attempt ended or expired; who is first in
    `landed` decides whether an expired attempt ended after all or is stuck.
    """

    ident: int
    raises: bool
    sent: bool = False
    ended: list[str] = msgspec.field(default_factory=list)
    landed: list[str] = msgspec.field(default_factory=list)

    def expire(self) -> bool:
        return _is_first(WATCHDOG, self.ended)

    def interrupt(self) -> None:
        self.cancel()
        if self.raises:
            raise_in(self.ident)
            self.sent = True

    def give_up(self) -> bool:
        return _is_first(WATCHDOG, self.landed)


WATCHDOG, THREAD = "watchdog", "thread"


def _is_first(who: str, arrivals: list[str]) -> bool:
    arrivals.append(who)
    return arrivals[0] is who


class BlockingPorts:
    """Ports of one call. The watchdog's thread calls `on_expiry` when it asks an attempt to stop."""

    alone = False
    soiled: frozenset[Any] = frozenset()
    """Nothing cancels a thread: see `AsyncPorts`."""

    def __init__(
        self,
        clock: Clock,
        stuck_grace: float,
        on_expiry: Callable[[Work, TimeLimit], None],
        *,
        raises: bool = False,
    ) -> None:
        self._raises = raises
        self.interruptible = False
        """Whether attempts without a time limit can be cut off too: see `BaseTask.hurry`."""
        self.now = clock.now
        self.sleeping = clock.sleeping
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        # Used in signal handlers: a SimpleQueue is reentrant, an Event's lock is not.
        self._mail: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.wake = self.alarm = partial(self._mail.put, None)
        self.deadlines = Deadlines(stuck_grace, on_expiry, self._make_try)
        self._tries = self.deadlines.tries
        self._pokes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._watchdog: threading.Thread | None = None
        self._start_lock = threading.RLock()
        self._closed = False
        self._ending = threading.Event()
        self._hurried = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sweep_at = 64
        """Forget ended threads when there are this many: every stuck attempt adds one."""
        self.poll = self.take = self._items.get
        self.turns = BlockingTurns
        self.on_crash: Callable[[BaseException], None]

    # ── lives ───────────────────────────────────────────────────────────────────────────────────────────

    def invoke(
        self, work: Work, call: Callable[..., Any], arguments: tuple[Any, ...], timeout: float | None
    ) -> Any:
        due, limit = work.deadline, work.limit
        if timeout is None and due == inf and not self.interruptible:
            try:
                return call(*arguments)
            except BaseException as raised:  # noqa: BLE001  an error of user code is a reply
                return failure_reply(raised)
        if self.deadlines.hurried and type(work) is Life:
            return self.deadlines.refuse(work)
        if timeout is not None or due != inf:
            now = self.now()
            due, limit = first_limit(work, timeout, now)
            if is_too_late(work, due, limit, now):
                return Failed(None, limit)
        ident = threading.get_ident()
        reply: Any = None
        error: BaseException | None = None
        this = ThreadTry(limit, work=work, due=due, ident=ident, raises=self._raises)
        in_time = False
        if due != inf and self._watchdog is None:
            self._start_watchdog()  # here, where no interrupt can break it off
        current_attempt.set(this)
        try:
            self._tries[ident] = this
            if due < self.deadlines.watch_at or self.deadlines.hurried:
                self.poke()
            try:
                reply = call(*arguments)
            except BaseException as raised:  # noqa: BLE001
                error = raised
            in_time = _is_first(THREAD, this.ended)
            if not in_time and this.raises:
                # The interrupt may have been swallowed already, or may still be pending.
                while not this.sent:
                    time.sleep(0)
                absorb(ident)
        except AttemptInterrupted:
            pass
        this.over = True
        current_attempt.follow_work()
        del self._tries[ident]
        return self._reply(this, in_time, reply, error)

    def _reply(self, this: ThreadTry, in_time: bool, reply: Any, error: BaseException | None) -> Any:
        if in_time:
            return reply if error is None else failure_reply(error)
        if not _is_first(THREAD, this.landed):
            return DISOWNED
        if error is None or isinstance(error, AttemptInterrupted):
            return Failed(None, this.limit, late=reply)
        return failure_reply(error, this.limit)

    def brief_poll(self, slots: Slots) -> Callable[[], Any]:
        return self.poll if self._raises else brief_poll(slots, self, blocking_attempt(slots, self))

    def _make_try(self, life: Life) -> ThreadTry:
        return ThreadTry(life.limit, work=life, due=inf, ident=life.driver, raises=False)

    def conclude(self, this: ThreadTry, reply: Any, error: BaseException | None) -> Any:
        """The reply of a first attempt that has got a token."""
        in_time = _is_first(THREAD, this.ended)
        this.over = True
        forget_token(this)
        return self._reply(this, in_time, reply, error)

    def pause(self, work: Work, seconds: float, postponed: bool) -> None:
        if seconds <= 0:
            return
        real = self.sleeping(max(min(seconds, work.deadline - self.now()), 0.0))
        if real > 0:
            (self._ending if postponed else self._hurried).wait(min(real, LONGEST_SLEEP))

    @property
    def ending(self) -> bool:
        return self._ending.is_set()

    def end_postponements(self) -> None:
        self._ending.set()

    def enter(self, life: Life) -> Any:
        try:
            outcome = life.context.run(self._live, life)
        except BaseException as error:  # noqa: BLE001  reported as an exit; the loop raises it
            return Exited(error)
        return None if outcome is DISOWNED else outcome

    def _live(self, life: Life) -> Any:
        plan = life.plan
        if plan.plain and not life.blocked:  # as `first_attempt`, without its call
            current_work.set(life)
            step = plan.main
            life.step = step.name
            reply = self.invoke(life, step.call, (life.transaction,), step.timeout)
        else:
            reply = first_attempt(life, self)
        if reply is DISOWNED:
            return DISOWNED
        outcome = early_outcome(life, reply)
        return self._go_on(life, reply) if outcome is None else outcome

    def _go_on(self, life: Life, reply: Any) -> Any:
        life.script = live(life, self, reply)
        return drive(life.script)

    def begin(self, life: Life) -> Any:
        try:
            reply = life.context.run(first_attempt, life, self)
        except BaseException as error:  # noqa: BLE001
            return Exited(error)
        return STUCK if reply is DISOWNED else reply

    def finish(self, life: Life, reply: Any) -> Any:
        try:
            outcome = early_outcome(life, reply) or life.context.run(self._go_on, life, reply)
        except BaseException as error:  # noqa: BLE001
            return Exited(error)
        return None if outcome is DISOWNED else outcome

    def go_on_from(self, life: Life, reply: Any) -> Any:
        return None if reply is DISOWNED else self.finish(life, reply)

    def decide(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            return run_blocking(call())
        except BaseException as error:  # noqa: BLE001
            return Exited(error)

    def enter_script(self, work: Work, reply: Failed | None) -> Any:
        try:
            assert work.script is not None
            result = work.context.run(drive, work.script, reply)
        except BaseException as error:  # noqa: BLE001
            return Exited(error)
        return None if result is DISOWNED else result

    # ── slots and loop ──────────────────────────────────────────────────────────────────────────────────

    def put(self, *items: Item) -> None:
        put = self._items.put
        for item in items:
            put(item)

    def glance(self) -> Any:
        try:
            return self._items.get_nowait()
        except queue.Empty:
            return WAIT

    def drain(self) -> list[Transaction | Life]:
        drained: list[Transaction | Life] = []
        while True:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                return drained
            if item is not None:
                drained.append(item)

    def spawn(self, script: Script[None]) -> None:
        self.start(self._carry, script)

    enlist = spawn

    def dismiss(self, count: int) -> None:
        self.put(*[None] * count)

    def _carry(self, script: Script[None]) -> None:
        try:
            drive(script)
        except BaseException as error:  # noqa: BLE001  if the engine died silently, its caller would hang
            self.on_crash(error)

    def start(self, target: Callable[..., Any], *arguments: Any) -> None:
        """Start a thread of the engine. A daemon, so a stuck one cannot keep the process alive."""
        thread = threading.Thread(target=target, args=arguments, name="onceward", daemon=True)
        thread.start()
        self._threads.append(thread)
        if len(self._threads) >= self._sweep_at:
            self._threads = [each for each in self._threads if each.is_alive()]
            self._sweep_at = 2 * len(self._threads) + 64

    def park(self, seconds: float | None) -> None:
        try:
            self._mail.get(timeout=None if seconds is None or seconds == inf else min(seconds, 3600.0))
            while True:
                self._mail.get_nowait()
        except queue.Empty:
            return

    def close(self, *, wait: bool) -> None:
        """End the watchdog, and wait for the dismissed workers if `wait`."""
        with self._start_lock:  # another thread may hurry the call just now
            self._closed = True
        if self._watchdog is not None:
            self._pokes.put(False)
            self._threads.append(self._watchdog)
        if wait:
            for thread in self._threads:
                thread.join()

    # ── the watchdog ────────────────────────────────────────────────────────────────────────────────────

    def _start_watchdog(self) -> None:
        with self._start_lock:
            if self._watchdog is None and not self._closed:
                watchdog = threading.Thread(target=self._watch, name="onceward-watchdog", daemon=True)
                watchdog.start()
                self._watchdog = watchdog  # now: `close` joins it

    def attempts(self) -> list[RunningAttempt]:
        return self.deadlines.attempts(lambda this: thread_stack(this.ident))

    def forgive(self, seconds: float) -> None:
        """Telemetry ran outside of attempts, and held up no thread but its own."""

    def hurry(self) -> None:
        self.deadlines.hurry()
        self.interruptible = True  # attempts are refused where they would be limited
        self._hurried.set()
        self._ending.set()
        self._start_watchdog()
        self.poke()

    def poke(self) -> None:
        """Have the watchdog look at what has begun."""
        self._pokes.put(True)

    def _watch(self) -> None:
        while True:
            now = self.now()
            try:
                nearest = self.deadlines.check(now)
            except Exception as error:  # noqa: BLE001  other attempts still need their watchdog
                self.on_crash(error)
                continue
            try:
                if not self._pokes.get(
                    timeout=None if nearest == inf else min(max(nearest - now, 0.0), 3600.0)
                ):
                    return
            except queue.Empty:
                pass
