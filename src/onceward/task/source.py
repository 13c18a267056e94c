"""How a loop uses its source: fetch work, settle outcomes, extend leases.

Every call to the source goes through `ask`, under the fetch policy. Outcomes are settled together, at the end of a
batch or after `SETTLE_INTERVAL`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from itertools import repeat
from math import inf
from typing import Any, Protocol

import msgspec

from onceward._process.forks import forks
from onceward._process.stop import AsyncStop, BlockingStop
from onceward.backoff import LONGEST_SLEEP
from onceward.task.exceptions import (
    LoopError,
    SettlementException,
    TransactionException,
)
from onceward.task.lifecycle import Step, check_reply, decide, end_forked, text_of
from onceward.task.mixins.policies import ProducerLoopPolicy
from onceward.task.report import StopReason
from onceward.task.script import Failed, Script, TimeLimit
from onceward.task.slots import SlotPorts, Slots
from onceward.task.work import Work
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

logger = OwnLogger(logging.getLogger("onceward.engine"))

SETTLE_INTERVAL = 0.2
"""Seconds an outcome waits at most to be settled with others, while transactions are in flight."""
PROMPTLY = 0.01
"""The same for a source that has more to deliver once an outcome is settled."""
LONGEST_WAIT = 5.0
"""Seconds until a source that waits for work is asked again in any case."""


class LoopPorts(SlotPorts, Protocol):
    """The I/O a loop needs, in addition to that of slots and lives."""

    def park(self, seconds: float | None) -> Any:
        """Wait until woken, at most this long."""
        ...

    def hurry(self) -> None:
        """Cut off attempts at transactions, make no more of them, and end what waits for one. From any thread."""
        ...

    def alarm(self) -> None:
        """`wake`, safe in signal handlers and from other threads."""
        ...

    def end_postponements(self) -> None:
        """Wake what waits because it is postponed, and let nothing wait for that any more."""
        ...

    def sleeping(self, seconds: float) -> float:
        """How long to really sleep: see `Clock`."""
        ...


class Source(msgspec.Struct, kw_only=True):
    """The source of transactions, as the loop sees it."""

    fetch: Step
    extra: dict[str, Any]
    settle: Step | None = None
    extend: Step | None = None
    wait: Callable[[float], Any] | None = None
    """Waits until there may be work; None if the source cannot."""
    lease: float = inf
    prompt: bool = False
    """Whether an outcome that is settled makes other messages available."""
    is_suspect: Callable[[Transaction], bool] | None = None
    """Whether a message that was fetched by itself must be alone; None if the source does not know."""
    extend_from_thread: Callable[[Sequence[Transaction]], None] | None = None
    """Extends leases while the event loop is blocked; None in threads, or if the connector cannot."""

    @property
    def afterwards(self) -> str:
        """What becomes of a transaction that fails, for the log."""
        if self.settle is None:
            return "; its source takes no outcomes and does not learn of it"
        return "; the source redelivers or dead-letters it"


class Loop(Work):
    """The work of one call."""

    def __init__(
        self,
        task: str,
        context: Context,
        deadline: float,
        *,
        policy: ProducerLoopPolicy,
        slots: Slots,
        ports: LoopPorts,
        source: Source | None,
        stop_requested: Callable[[], bool],
        hand_over: Callable[[Loop, Failed], None],
        halt: BlockingStop | AsyncStop,
    ) -> None:
        super().__init__(context)
        self.task = task
        self.deadline = deadline
        self.policy = policy
        self.slots = slots
        self.ports = ports
        self.source = source
        self.stop_requested = stop_requested
        self.hand_over = hand_over
        self.halt = halt
        """Ends the source's waits for a server that does not answer."""
        self.watch = slots.plan.watch
        self.hurried = False
        self.started = 0
        self.error: LoopError | None = None
        self.reason: StopReason | None = None
        self.open: dict[int, Transaction] = {}
        """Deliveries that are not settled yet, by identity."""
        self.settled_at = 0.0
        self.settle_interval = PROMPTLY if source is not None and source.prompt else SETTLE_INTERVAL
        self.extend_due = inf
        if source is not None and source.settle is not None:
            slots.settled = deque()

    def resume(self, reply: Failed) -> None:
        self.hand_over(self, reply)

    def stop(self) -> None:
        """Start nothing more that can be given back. Safe in signal handlers."""
        self.halt.request()
        if self.returnable:
            self.slots.closed = True
        self.ports.alarm()

    def hurry(self) -> None:
        """Start nothing more at all, and stop waiting."""
        self.halt.request()
        self.hurried = self.slots.closed = True
        self.ports.hurry()
        self.ports.alarm()

    @property
    def returnable(self) -> bool:
        """Whether unstarted work can go back to the source, or never left the caller.

        Work from a source that cannot take it back is finished even when the loop is stopped, or it would be lost.
        """
        return self.slots.settled is not None or self.source is None

    def ending(self) -> StopReason | None:
        """The reason to end now, if there is one. An empty source is not among them."""
        if self.error is not None:
            return self.reason
        if self.slots.exited is not None:
            return StopReason.INTERRUPTED
        if self.out_of_time():
            return StopReason.TIMEOUT
        if self.hurried or self.stop_requested():
            return StopReason.STOPPED
        return None

    def out_of_time(self) -> bool:
        return self.deadline != inf and self.ports.now() >= self.deadline

    def room(self) -> int:
        """How many transactions to take next: a batch, or the rest of the limit."""
        size, limit = self.policy.batch.size, self.policy.limit
        return size if limit is None else min(size, limit - self.started)

    def keep(self, batch: Sequence[Transaction]) -> None:
        """Extend the leases of these until they are settled."""
        if self.slots.settled is not None:
            self.open.update(zip(map(id, batch), batch, strict=True))
            if self.source is not None and self.extend_due == inf:
                self.extend_due = self.ports.now() + self.source.lease / 3

    def submit(self, batch: Sequence[Transaction]) -> None:
        self.started += len(batch)
        self.keep(batch)
        self.slots.submit(batch)


def batch_problem(batch: Any, size: int) -> str | None:
    """What is wrong with a fetched batch, if anything."""
    if batch is None:
        return None
    if type(batch) is not list and not isinstance(batch, Sequence):  # asking an abstract class takes long
        return f"the connector returned {type(batch).__name__}; fetch must return a list of Transaction"
    if len(batch) > size:
        return f"the connector returned {len(batch)} transactions but at most {size} were requested"
    for kind in set(map(type, batch)):
        if not issubclass(kind, Transaction):
            return f"the connector returned a {kind.__name__}; fetch must return only Transaction objects"
    return None


def fail(loop: Loop, reason: StopReason, error: LoopError) -> None:
    """End the loop with this error, unless it already has one."""
    logger.info("the loop ends: %s", error)  # only info: the caller gets the error
    if loop.error is None:
        loop.error, loop.reason = error, reason


def ask(
    loop: Loop,
    step: Step,
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    insist: bool = False,
    check: Callable[[Any], str | None] | None = None,
) -> Script[Any]:
    """Call the source, within a step's attempts. Returns its answer, or `Failed` with its last error.

    A loop that is ending makes no further attempts unless it insists: outcomes must be settled. The span shows what
    `check` finds wrong with the answer.
    """
    watch = loop.watch
    assert loop.source is not None
    attempt = 0
    while True:
        loop.step, loop.attempt = step.name, attempt
        begun = None if watch is None else watch.ask_begins(loop, step, arguments)
        reply = yield loop.ports.invoke, (loop, call, arguments, step.timeout)
        if loop.slots.plan.generation != forks.generation:
            end_forked(loop.slots.plan, step.name, reply)
        reply = check_reply(reply, step)
        if type(reply) is not Failed:
            if watch is not None:
                problem = None if check is None else check(reply)
                watch.ask_ends(begun, step, problem and TransactionException(problem), None, reply)
            return reply
        if reply.late and step is loop.source.fetch:
            return_late(loop, reply.late)
        decision = decide(step, attempt, reply, None)
        if watch is not None:
            watch.ask_ends(begun, step, decision.error, decision.delay)
        if reply.exits:
            loop.slots.exited = loop.slots.exited or reply.error
            return reply
        loop.slots.tally.timed_out += reply.limit is not None
        reply.error = reply.error or decision.error
        if decision.delay is None or reply.limit is TimeLimit.LOOP:
            return reply
        logger.warning(
            "%s failed (attempt %d of %d), next in %.3g s: %s",
            step.name, attempt + 1, step.max_attempts, decision.delay,
            " ".join(str(decision.error).split()),
        )  # fmt: skip
        loop.slots.tally.retries += 1
        yield from rest(loop, decision.delay, insist=insist)
        if loop.out_of_time() or (loop.ending() is not None and not insist):
            return reply
        attempt += 1


def await_work(loop: Loop, backoff: float) -> Script[None]:
    """Let the source wait until there may be work, doing chores meanwhile, or until the loop has a reason to end.

    If the source fails, wait for `backoff` instead: the next fetch reports what is wrong.
    """
    assert loop.source is not None
    assert loop.source.wait is not None
    until = loop.ports.now() + LONGEST_WAIT
    while loop.ending() is None and (left := until - loop.ports.now()) > 0:
        seconds = min(left, patience(loop))
        reply = yield loop.ports.invoke, (loop, loop.source.wait, (seconds,), None)
        if loop.slots.plan.generation != forks.generation:
            end_forked(loop.slots.plan, "fetch", reply)
        if type(reply) is Failed:
            if reply.exits:
                loop.slots.exited = loop.slots.exited or reply.error
                return
            logger.debug("the source cannot wait for work now: %s", text_of(reply.error))
            yield from rest(loop, backoff)
            return
        if reply:
            return
        yield from chores(loop)


def return_late(loop: Loop, batch: Any) -> None:
    """Give back what a fetch delivered after its time was up; it would wait for its lease."""
    if batch_problem(batch, sys.maxsize) is None:
        return_unbegun(loop, batch)


def return_unbegun(loop: Loop, batch: Sequence[Transaction], delay: float = 0.0) -> None:
    """Give back what was fetched, to be delivered again after a delay."""
    if loop.slots.settled is not None:
        loop.slots.settled.extend(Settlement(each, Verdict.RETURNED, delay=delay) for each in batch)


def rest(loop: Loop, seconds: float, *, insist: bool = False) -> Script[None]:
    """Sleep for a backoff, doing chores meanwhile, or until the loop has a reason to end."""
    if loop.watch is not None:
        loop.watch.record_backoff(loop.step, seconds)
    until = loop.ports.now() + loop.ports.sleeping(seconds)
    while True:
        left = max(until - loop.ports.now(), 0.0)
        # Even without a delay: other tasks of the event loop need their turn.
        yield loop.ports.park, (min(left, patience(loop)),)
        if left == 0 or loop.out_of_time() or (loop.ending() is not None and not insist):
            return
        if not insist:
            yield from chores(loop)
        elif loop.ports.now() >= loop.extend_due:  # the outcomes are what it waits for, but leases go on
            yield from extend(loop)


def patience(loop: Loop) -> float:
    """Seconds until the loop has something to do, even if nothing happens."""
    now = loop.ports.now()
    until = min(loop.deadline, loop.extend_due)
    slots = loop.slots
    if slots.settled is not None and (slots.settled or slots.deferred or slots.pending > 0):
        until = min(until, now + loop.settle_interval)
    return max(until - now, 0.0)


def chores(loop: Loop) -> Script[None]:
    """Settle outcomes and extend leases, if due."""
    settled = loop.slots.settled
    if settled is None or loop.out_of_time():
        return  # `give_back` settles the rest, without a time limit
    now = loop.ports.now()
    extend_now = now >= loop.extend_due
    if extend_now or len(settled) >= loop.policy.batch.size or now - loop.settled_at >= loop.settle_interval:
        yield from settle(loop)
    if extend_now:
        yield from extend(loop)


def settle(loop: Loop) -> Script[None]:
    """Settle every outcome there is, in one call."""
    loop.settled_at = loop.ports.now()
    settled = loop.slots.settled
    if not settled or loop.reason is StopReason.SETTLE_ERROR:
        return
    assert loop.source is not None
    assert loop.source.settle is not None
    batch = [settled.popleft() for _ in range(len(settled))]
    reply = yield from ask(loop, loop.source.settle, loop.source.settle.call, (batch,), insist=True)
    if type(reply) is Failed and loop.out_of_time() and not reply.exits:
        # The loop is out of time; the source has not failed. `give_back` settles again, without a time limit.
        settled.extendleft(reversed(batch))
        return
    if type(reply) is Failed:
        error = SettlementException(f"{len(batch)} outcomes could not be settled: {text_of(reply.error)}")
        error.__cause__ = reply.error
        fail(loop, StopReason.SETTLE_ERROR, error)
        return
    settled_ids = [id(settlement.transaction) for settlement in batch]
    deque(map(loop.open.pop, settled_ids, repeat(None)), maxlen=0)  # a loop, without its steps in Python


def extend(loop: Loop) -> Script[None]:
    """Extend the lease of every delivery that is not settled yet."""
    source = loop.source
    assert source is not None
    loop.extend_due = loop.ports.now() + source.lease / 3
    if source.extend is None or not loop.open:
        return
    reply = yield from ask(loop, source.extend, source.extend.call, (list(loop.open.values()),))
    if type(reply) is Failed:
        # The next round may still be in time; if not, the source redelivers.
        logger.error(
            "leases of %d transactions could not be extended: %s", len(loop.open), text_of(reply.error)
        )


class LeaseGuard:
    """Extends leases from a thread while a handler blocks the event loop, so its loop cannot."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._over = threading.Event()

    def start(self) -> None:
        source = self._loop.source
        if source is not None and source.extend_from_thread is not None and source.lease < inf:
            threading.Thread(
                target=self._watch,
                args=(source.lease / 6, source.extend_from_thread),
                name="onceward-leases",
                daemon=True,
            ).start()

    def end(self) -> None:
        self._over.set()

    def _watch(self, interval: float, extend: Callable[[Sequence[Transaction]], None]) -> None:
        loop = self._loop
        while not self._over.wait(min(interval, LONGEST_SLEEP)):
            if loop.ports.now() < loop.extend_due + interval or not loop.open:
                continue
            try:
                extend(list(loop.open.values()))
            except Exception as error:  # noqa: BLE001  the next round may still be in time
                if not self._over.is_set():
                    logger.error("leases could not be extended while the event loop is blocked: %s", error)
