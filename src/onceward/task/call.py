"""One call of an engine: assemble plan, slots, loop and ports, run them, and return a report or raise an error."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, TypeVar, cast

import msgspec

from onceward._coroutines import watch_coroutines
from onceward._functions import awaiting
from onceward._process.forks import UserCode, forks
from onceward._process.stop import AsyncStop, BlockingStop
from onceward._sync import as_coroutine, as_function, run_blocking
from onceward.middleware import Middleware
from onceward.task.attempts.observers import observed, split
from onceward.task.base import BaseTask
from onceward.task.cancellation import current_token, raise_if_cancelled
from onceward.task.deadlines import RunningAttempt
from onceward.task.exceptions import (
    AttemptInterrupted,
    ConsumerLoopTimeoutException,
    LoopError,
    ProducerLoopTimeoutException,
)
from onceward.task.groups.together import Grouping
from onceward.task.lifecycle import Step
from onceward.task.loops import LANDING, give_back
from onceward.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from onceward.task.ports_asyncio import AsyncPorts
from onceward.task.ports_threads import BlockingPorts
from onceward.task.report import Report, StopReason
from onceward.task.script import Exited, Failed, Script, TimeLimit, drive_async
from onceward.task.slots import Slots
from onceward.task.source import LeaseGuard, Loop, LoopPorts, Source
from onceward.task.work import UNSEEN, CallPlan, Life, Outcome, Work
from onceward.telemetry.context import current_attempt
from onceward.telemetry.engine_spans import EngineSpans, Names
from onceward.telemetry.log_thread import log_thread
from onceward.telemetry.logger import OwnLogger, Tracebacks, do_soon

logger = OwnLogger(logging.getLogger("onceward.engine"))

SIGNAL_CHECK = 0.25
"""Seconds after which the main thread checks for signals."""
LAST_WORD = LANDING + 2.0
"""Seconds a call that is out of time waits for its loop to end, while unstarted work goes back to the source. A loop
that is stuck in its source does not hold the caller any longer."""
NOT_DEFINED: set[Any] = set()
"""The mixins' default handlers, which do nothing."""
REQUIRED: set[Any] = set()
"""The methods that a task has to define."""

F = TypeVar("F", bound=Callable[..., Any])


class Wiring(msgspec.Struct, kw_only=True):
    """What one call runs: its steps, source, script and middleware."""

    span: str
    life_span: str
    policy: ConsumerPolicy | ProducerPolicy
    main: Step
    success: Step
    exception: Step
    source: Source | None
    script: Callable[[Loop], Script[StopReason]]
    timeout_error: type[ConsumerLoopTimeoutException] | type[ProducerLoopTimeoutException]
    postpones: bool = False
    """Whether postponed transactions go back to the source."""
    chain: Sequence[Middleware] = ()
    """The middleware around steps and source, outermost first, without telemetry."""
    guard: Middleware | None = None
    """Around the steps of the chain: see `onceward.task.guards.receipt`."""
    grouping: Grouping | None = None
    """How first attempts are decided in groups."""
    on_outcome: Callable[[Outcome], None] | None = None


class Call:
    """One consume or produce call, from assembly to report."""

    def __init__(self, task: BaseTask, wiring: Wiring) -> None:
        self.task = task
        self.wiring = wiring
        self.now = task.clock.now
        self.began = self.now()
        self.deadline = inf if wiring.policy.loop.timeout is None else self.began + wiring.policy.loop.timeout
        self.watch = EngineSpans.create_if_enabled(
            Names(
                task.name,
                wiring.span,
                wiring.life_span,
                loop_attributes(wiring.policy),
                task.settings.telemetry_fields,
                task.destination,
            ),
            self.now,
            self.forgive,
        )
        self.context = contextvars.copy_context()
        self.nested = current_attempt.get() is not None
        self.context.run(current_attempt.follow_work)
        self.stops_before = task._engine.stops_obeyed
        self.stuck_asking = False
        self.ports: BlockingPorts | AsyncPorts
        self.slots: Slots
        self.loop: Loop

    def assemble(self, ports: BlockingPorts | AsyncPorts, hand_over: Callable[[Failed], None]) -> None:
        """Create everything that depends on whether the call runs in threads or asyncio."""
        task, wiring = self.task, self.wiring
        self.ports = ports
        ports.on_crash = self.handle_crash
        ports.interruptible = task.interruptible or self.nested
        ids = task._engine.ids
        if self.watch is not None:
            self.context.run(self.watch.loop_begins, lambda: len(ids.holders))
        limited = self.deadline != inf or wiring.policy.loop.transaction_timeout is not None
        plan = CallPlan(
            task=task.name,
            main=self._wrap(wiring.main),
            token_of=ports.deadlines.token_of,
            success=self._wrap(wiring.success),
            exception=self._wrap(wiring.exception),
            transaction_timeout=wiring.policy.loop.transaction_timeout,
            loop_deadline=self.deadline,
            limited=limited,
            plain=not limited and self.watch is None,
            postpones=wiring.postpones,
            afterwards="" if wiring.source is None else wiring.source.afterwards,
            grouping=wiring.grouping,
            watch=self.watch,
            unseen=UNSEEN if self.watch is None and wiring.on_outcome is None else None,
            tracebacks=Tracebacks(),
            generation=forks.generation,
        )
        self.slots = Slots(
            plan, ids, cast(LoopPorts, ports), wiring.policy.loop.concurrency.value, self.context
        )
        self.slots.on_outcome = wiring.on_outcome
        self.loop = Loop(
            task.name,
            self.context,
            self.deadline,
            policy=wiring.policy.loop,
            slots=self.slots,
            ports=cast(LoopPorts, ports),
            source=wiring.source,
            stop_requested=lambda: task._engine.stops > self.stops_before,
            hand_over=partial(self._take_over, hand_over),
            halt=AsyncStop() if task.asynchronous else BlockingStop(),
        )
        self.loop.script = wiring.script(self.loop)
        task._engine.running[id(self)] = self

    def stop(self) -> None:
        self.loop.stop()

    def hurry(self) -> None:
        self.loop.hurry()

    def follow_attempt(self) -> Callable[[], None]:
        """Have this call cut off with the attempt that makes it, if there is one, until the result is called."""
        token = current_token()
        if token is None:
            return lambda: None
        return partial(token.remove, token.add(self.cut_off))

    def cut_off(self) -> None:
        """The attempt that makes this call was asked to stop: stop those of this call, and start nothing more."""
        self.slots.exited = self.slots.exited or AttemptInterrupted(
            "the attempt that made this call ran out of time"
        )
        self.slots.closed = True
        self.ports.hurry()
        self.ports.alarm()

    @property
    def stuck(self) -> int:
        return self.slots.stuck_now + self.stuck_asking

    def attempts(self) -> list[RunningAttempt]:
        return self.ports.attempts()

    def _wrap(self, step: Step) -> Step:
        """Wrap the step in its middleware. Unwrapped, a default handler is `silent`: it is never called."""
        asynchronous = self.task.asynchronous
        chain, observers = split(self.wiring.chain, step)
        handler = observed(step.call, observers, asynchronous=asynchronous) if observers else step.call
        checking = awaiting if asynchronous else as_coroutine
        bare = call = checking(handler) if chain else handler
        for each in reversed(chain):
            call = each.wrap_step(step, call)
        if self.wiring.guard is not None:
            call = self.wiring.guard.wrap_step(step, call)
        if call is not bare:
            return msgspec.structs.replace(step, call=call if asynchronous else as_function(call))
        if observers:
            return msgspec.structs.replace(step, call=handler)
        silent = self.watch is None and getattr(step.call, "__func__", None) in NOT_DEFINED
        return msgspec.structs.replace(step, silent=silent)

    def _take_over(self, hand_over: Callable[[Failed], None], loop: Loop, reply: Failed) -> None:
        """The source does not answer, so the driver of the loop is stuck: let another one continue."""
        self.stuck_asking = True
        self.slots.tally.stuck += 1
        loop.context = loop.context.copy()
        loop.context.run(current_attempt.set, None)
        hand_over(reply)

    def forgive(self, seconds: float, work: Any = None) -> None:
        """Telemetry took this long. That counts neither towards this work's limit nor, in asyncio, those of others."""
        held_up = {id(work): work}
        if self.task.asynchronous:
            held_up.update((id(life), life) for life in list(self.task._engine.ids.holders.values()))
        for life in held_up.values():
            if (
                isinstance(life, Life)
                and life.plan is self.slots.plan
                and life.limit is TimeLimit.TRANSACTION
            ):
                life.deadline += seconds
                if life.deadline >= self.deadline:
                    life.deadline, life.limit = self.deadline, TimeLimit.LOOP
        self.ports.forgive(seconds)

    def report_expiry(self, work: Work, limit: TimeLimit) -> None:
        """Log that an attempt is asked to stop. Does not wait for it to end, which may never happen."""
        if limit is TimeLimit.HURRY:
            text = "%s was cut off because the run is ending; transaction %s is abandoned"
            logger.post(logging.WARNING, text, work.step, work.transaction_id, context=work.context)
            return
        text = "%s attempt %d ran out of time (%s limit)"
        logger.post(logging.WARNING, text, work.step, work.attempt + 1, limit, context=work.context)
        if self.watch is not None:
            do_soon(partial(self.watch.record_timeout, work.step, limit))

    def handle_crash(self, error: BaseException) -> None:
        """The engine itself failed: end the call with this error instead of hanging."""
        self.slots.break_off(error)
        logger.critical("the engine failed", exc_info=error)

    def conclude(self, ended: StopReason | Exited) -> Report:
        """Return the report of the call, or raise the error that carries it."""
        engine = self.task._engine
        engine.running.pop(id(self), None)
        engine.stops_obeyed = max(engine.stops_obeyed, engine.stops)
        tally = self.slots.tally
        report = msgspec.structs.replace(
            tally, duration=self.now() - self.began, failed_by_category=dict(tally.failed_by_category)
        )
        error: BaseException | None
        if isinstance(ended, Exited):
            report.stop_reason, error = StopReason.INTERRUPTED, ended.error
        elif ended is StopReason.INTERRUPTED:
            report.stop_reason, error = ended, self.slots.exited
        elif ended is StopReason.TIMEOUT:
            limit = self.wiring.policy.loop.timeout
            report.stop_reason, error = (
                ended,
                self.wiring.timeout_error(f"the loop took longer than {limit} s"),
            )
        else:
            report.stop_reason, error = ended, self.loop.error
        if self.loop.error is not None and error is not self.loop.error:
            logger.error("the loop also failed: %s", self.loop.error)
        if isinstance(error, LoopError):
            error.report = report
        if self.watch is not None:
            self.watch.loop_ends(report, error)
        if error is not None:
            raise error
        return report


async def begin_all(chain: Sequence[Middleware]) -> None:
    """Begin each, outermost first. If one raises, end those that have begun."""
    for number, each in enumerate(chain):
        try:
            with UserCode(f"middleware {each.name}"):
                await each.begin()
        except BaseException:
            await end_all(chain[:number])
            raise


async def end_all(chain: Sequence[Middleware]) -> None:
    """End each, innermost first. Errors are logged."""
    for each in reversed(chain):
        try:
            with UserCode(f"middleware {each.name}"):
                await each.end()
        except Exception:
            logger.exception("middleware %s failed at the end of the call", each.name)


def loop_attributes(policy: ConsumerPolicy | ProducerPolicy) -> dict[str, Any]:
    """The settings of a loop, as span attributes."""
    loop = policy.loop
    settings = {
        "batch_size": loop.batch.size,
        "concurrency": loop.concurrency.value,
        "limit": loop.limit,
        "loop_timeout": loop.timeout,
        "transaction_timeout": loop.transaction_timeout,
        "mode": getattr(loop, "mode", None),
        "streaming": getattr(loop, "streaming", None),
    }
    return {name: value for name, value in settings.items() if value is not None}


def does_nothing(handler: F) -> F:
    """Mark a mixin's default handler."""
    NOT_DEFINED.add(handler)
    return handler


def required(method: F) -> F:
    """Mark a mixin's method that a task has to define."""
    REQUIRED.add(method)
    return method


def run_in_threads(task: BaseTask, wiring: Wiring) -> Report:
    """Run the call in threads; the caller's thread only waits."""
    raise_if_cancelled()
    watch_coroutines()
    run_blocking(begin_all(wiring.chain))
    call = Call(task, wiring)
    settings = task.settings
    ports = BlockingPorts(
        task.clock, settings.stuck_grace, call.report_expiry, raises=settings.interrupt == "raise"
    )
    ended: list[StopReason | Exited] = []
    bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def carry(reply: Any) -> None:
        result = ports.enter_script(call.loop, reply)
        if result is not None:
            ended.append(result)
            bell.put(None)

    # The main thread wakes often: a signal delivered to another thread does not wake it.
    longest = SIGNAL_CHECK if threading.current_thread() is threading.main_thread() else 3600.0
    ticket = [True]

    def begin() -> None:
        # Only once: a Ctrl-C may have interrupted the start of this thread, so it may be started twice.
        if ticket and ticket.pop():
            carry(None)

    call.assemble(ports, lambda reply: ports.start(carry, reply))
    end_following = call.follow_attempt()
    interrupted: KeyboardInterrupt | None = None
    over = closed = False
    patient = True
    while not closed:
        try:
            while not over and not ended and call.now() < call.deadline + LAST_WORD:
                if ticket:
                    ports.start(begin)
                with suppress(queue.Empty):
                    bell.get(timeout=max(min(call.deadline + LAST_WORD - call.now(), longest), 0.0))
            over = True
            # Broken off by an exception from outside, these are done again: a thread would be left.
            call.slots.dismiss()
            idle = not (call.slots.pending or call.slots.stuck_now or call.stuck_asking)
            ports.close(wait=bool(ended) and idle and patient)
            closed = True
        except KeyboardInterrupt as error:
            # The first Ctrl-C lets work in flight finish, the second does not.
            patient = not over
            over = over or interrupted is not None
            interrupted = interrupted or error
            call.slots.exited = call.slots.exited or error
            call.slots.closed = True
            call.loop.halt.request()
            ports.alarm()
        except AttemptInterrupted:  # of an attempt with interrupt="raise"
            call.cut_off()
    try:
        end_following()
        run_blocking(end_all(wiring.chain))
        log_thread.flush()
    finally:  # even if another Ctrl-C arrives now
        result = Exited(interrupted) if interrupted is not None else ended[0] if ended else StopReason.TIMEOUT
        report = call.conclude(result)
    return report


async def run_in_tasks(task: BaseTask, wiring: Wiring) -> Report:
    """Run the call in asyncio tasks; the caller's task only waits."""
    raise_if_cancelled()
    watch_coroutines()
    await begin_all(wiring.chain)
    call = Call(task, wiring)
    ports = AsyncPorts(task.clock, task.settings.stuck_grace, call.report_expiry)
    ended: asyncio.Future[StopReason | Exited] = asyncio.get_running_loop().create_future()

    async def carry(reply: Any) -> None:
        result = await ports.enter_script(call.loop, reply)
        if result is not None and not ended.done():
            ended.set_result(result)

    def hand_over(reply: Any) -> None:
        ports.start(carry(reply))

    call.assemble(ports, hand_over)
    guard = LeaseGuard(call.loop)
    guard.start()
    end_following = call.follow_attempt()
    ports.start(carry(None))
    result: StopReason | Exited
    try:
        done, _ = await asyncio.wait(
            (ended,), timeout=None if call.deadline == inf else call.deadline - call.now() + LAST_WORD
        )
        result = ended.result() if done else StopReason.TIMEOUT
    except asyncio.CancelledError as error:
        result = Exited(error)
        call.loop.halt.request()
        call.slots.close()
        tasks = ports.cancel()
        call.slots.dismiss()
        # Whatever happens now, the caller gets its cancellation.
        with suppress(asyncio.CancelledError):
            if tasks:
                await asyncio.wait(tasks, timeout=task.settings.stuck_grace)
            # In a task of its own, which the cancellation has not reached.
            giving = asyncio.create_task(
                drive_async(give_back(call.loop), None, ports.failure_reply), context=call.loop.context.copy()
            )
            try:
                await asyncio.wait((giving,), timeout=task.settings.stuck_grace)
            finally:
                giving.cancel()
    except GeneratorExit:  # closed, not canceled: nothing can be awaited any more
        guard.end()
        with suppress(RuntimeError):  # the event loop is closed
            ports.cancel()
        raise
    guard.end()
    call.slots.dismiss()
    ports.close()
    end_following()
    try:
        await ports.join()
        await end_all(wiring.chain)
    finally:  # even if another cancellation arrives now
        report = call.conclude(result)
    return report
