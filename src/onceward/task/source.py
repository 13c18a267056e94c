"""One loop's dealings with its source: asking for work, telling how it ended, keeping the leases.

Everything the source is asked goes through `ask`, within the fetch policy. Outcomes are told together, at the
end of a batch or after a moment.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from math import inf
from typing import Any, Protocol

import msgspec

from onceward.task.exceptions import FetchException, FetchTimeoutException, LoopError, SettlementException
from onceward.task.lifecycle import Step, decide, line_of, text_of
from onceward.task.mixins.policies import ProducerLoopPolicy
from onceward.task.report import StopReason
from onceward.task.script import Failed, Limit, Script
from onceward.task.slots import SlotPorts, Slots
from onceward.task.work import Work
from onceward.transaction import Settlement, Transaction

logger = logging.getLogger("onceward.engine")

SETTLE_INTERVAL = 0.2
"""Seconds an outcome waits at most for company before the source is told, while others are in flight."""


class LoopPorts(SlotPorts, Protocol):
    """What a loop needs from outside, beside what slots and lives need."""

    def park(self, seconds: float | None) -> Any:
        """Wait until woken, but no longer than this."""
        ...

    def alarm(self) -> None:
        """`wake`, safe from signal handlers and other threads."""
        ...

    def sleeping(self, seconds: float) -> float:
        """How long a sleep of this length shall really take: see `Clock`."""
        ...


class Source(msgspec.Struct, kw_only=True):
    """Where transactions come from, as far as the loop cares."""

    fetch: Step
    extra: dict[str, Any]
    settle: Step | None = None
    extend: Step | None = None
    lease: float = inf


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
        self.watch = slots.plan.watch
        self.started = 0
        self.error: LoopError | None = None
        self.reason: StopReason | None = None
        self.open: dict[int, Transaction] = {}
        """Deliveries the source has not been told the end of, by identity."""
        self.settled_at = 0.0
        self.extend_due = inf
        if source is not None and source.settle is not None:
            slots.settled = deque()

    def resume(self, reply: Failed) -> None:
        self.hand_over(self, reply)

    def stop(self) -> None:
        """Asked to stop, perhaps in a signal handler: from now on nothing is started that can be given back."""
        if self.returnable:
            self.slots.closed = True
        self.ports.alarm()

    @property
    def returnable(self) -> bool:
        """Whether unstarted work has somewhere to go back to: to the source, or it never left the caller.

        A source that cannot take back what it gave would lose it: that is finished even when stopped.
        """
        return self.slots.settled is not None or self.source is None

    def ending(self) -> StopReason | None:
        """A reason to end that does not come from the source, if there is one."""
        if self.error is not None:
            return self.reason
        if self.slots.exited is not None:
            return StopReason.INTERRUPTED
        if self.out_of_time():
            return StopReason.TIMEOUT
        if self.stop_requested():
            return StopReason.STOPPED
        return None

    def out_of_time(self) -> bool:
        return self.deadline != inf and self.ports.now() >= self.deadline

    def room(self) -> int:
        """How many to take in next: a batch, or what is left of the limit."""
        size, limit = self.policy.batch.size, self.policy.limit
        return size if limit is None else min(size, limit - self.started)

    def submit(self, batch: Sequence[Transaction]) -> None:
        self.started += len(batch)
        if self.slots.settled is not None:
            for transaction in batch:
                self.open[id(transaction)] = transaction
            if self.source is not None and self.extend_due == inf:
                self.extend_due = self.ports.now() + self.source.lease / 3
        self.slots.submit(batch)


def fetch(loop: Loop, size: int) -> Script[Sequence[Transaction] | None]:
    """One batch, within the fetch policy. None when the loop has a reason to end instead."""
    source = loop.source
    assert source is not None

    def call(*arguments: Any) -> Any:
        # A connector may do what it likes with its arguments; the policy stays as it was.
        return source.fetch.call(*arguments, **copy.deepcopy(source.extra))

    reply = yield from ask(loop, source.fetch, call if source.extra else source.fetch.call, (size,))
    if type(reply) is Failed:
        if reply.exits:
            return None
        if reply.limit is not Limit.LOOP and loop.ending() is None:
            fail(loop, StopReason.FETCH_ERROR, fetch_error(reply))
        else:
            logger.warning("the last fetch failed while the loop was ending: %s", text_of(reply.error))
        return None
    batch: Sequence[Transaction] = () if reply is None else reply
    loop.slots.tally.fetches += 1
    loop.slots.tally.empty_fetches += not batch
    if not batch and loop.watch is not None:
        loop.watch.empty()
    problem = unfit(batch, size)
    if problem:
        fail(loop, StopReason.FETCH_ERROR, FetchException(problem))
        return None
    return batch


def unfit(batch: Any, size: int) -> str | None:
    """What is wrong with a fetched batch, if anything."""
    if not isinstance(batch, Sequence):
        return f"the connector returned {type(batch).__name__}; fetch must return a list of Transaction"
    if len(batch) > size:
        return f"the connector returned {len(batch)} transactions where at most {size} were asked for"
    for kind in set(map(type, batch)):
        if not issubclass(kind, Transaction):
            return f"the connector returned a {kind.__name__} among its transactions"
    return None


def fetch_error(reply: Failed) -> FetchException:
    """A fetch that gave up, as what the caller of the loop gets."""
    if isinstance(reply.error, FetchException):
        return reply.error
    cls = FetchTimeoutException if reply.limit is not None else FetchException
    error = cls(f"fetching gave up: {text_of(reply.error)}")
    error.__cause__ = reply.error
    return error


def fail(loop: Loop, reason: StopReason, error: LoopError) -> None:
    """End the loop with this error, unless it has one already."""
    logger.info("the loop ends: %s", error)  # no alarm: whoever made the call gets it
    if loop.error is None:
        loop.error, loop.reason = error, reason


def ask(
    loop: Loop, step: Step, call: Callable[..., Any], arguments: tuple[Any, ...], *, insist: bool = False
) -> Script[Any]:
    """Call the source, within a step's attempts. Returns its answer, or `Failed` with what it raised last.

    A loop that is to end asks no further, unless it insists: what has been done must be told.
    """
    watch = loop.watch
    attempt = 0
    while True:
        loop.step, loop.attempt = step.name, attempt
        begun = None if watch is None else watch.ask_begins(loop, step)
        reply = yield loop.ports.invoke, (loop, call, arguments, step.timeout)
        if type(reply) is not Failed:
            if watch is not None:
                watch.ask_ends(begun, step, None, None)
            return reply
        decision = decide(step, attempt, reply, None)
        if watch is not None:
            watch.ask_ends(begun, step, decision.error, decision.delay)
        if reply.exits:
            loop.slots.exited = loop.slots.exited or reply.error
            return reply
        loop.slots.tally.timed_out += reply.limit is not None
        reply.error = reply.error or decision.error
        if decision.delay is None or reply.limit is Limit.LOOP:
            return reply
        logger.warning(
            "%s failed (attempt %d of %d), next in %.3g s: %s",
            step.name, attempt + 1, step.max_attempts, decision.delay, line_of(decision.error),
        )  # fmt: skip
        loop.slots.tally.retries += 1
        yield from rest(loop, decision.delay, insist=insist)
        if loop.out_of_time() or (loop.ending() is not None and not insist):
            return reply
        attempt += 1


def rest(loop: Loop, seconds: float, *, insist: bool = False) -> Script[None]:
    """Sleep out a backoff, with an eye on chores, or until the loop has a reason to end."""
    if loop.watch is not None:
        loop.watch.backoff(loop.step, seconds)
    until = loop.ports.now() + loop.ports.sleeping(seconds)
    while True:
        left = max(until - loop.ports.now(), 0.0)
        # Also when there is nothing to wait for: others on the same event loop want their turn.
        yield loop.ports.park, (min(left, patience(loop)),)
        if left == 0 or loop.out_of_time() or (loop.ending() is not None and not insist):
            return
        if not insist:
            yield from chores(loop)


def patience(loop: Loop) -> float:
    """Seconds until the loop has something to do, whatever happens."""
    now = loop.ports.now()
    until = min(loop.deadline, loop.extend_due)
    slots = loop.slots
    if slots.settled is not None and (slots.settled or slots.deferred or slots.pending > 0):
        until = min(until, now + SETTLE_INTERVAL)
    return max(until - now, 0.0)


def chores(loop: Loop) -> Script[None]:
    """Tell the source what is due."""
    settled = loop.slots.settled
    if settled is None or loop.out_of_time():
        return  # the last words to the source have no time limit
    now = loop.ports.now()
    extend_now = now >= loop.extend_due
    if extend_now or len(settled) >= loop.policy.batch.size or now - loop.settled_at >= SETTLE_INTERVAL:
        yield from settle(loop)
    if extend_now:
        yield from extend(loop)


def settle(loop: Loop) -> Script[None]:
    """Tell the source every outcome there is, in one call."""
    loop.settled_at = loop.ports.now()
    settled = loop.slots.settled
    if not settled or loop.reason is StopReason.SETTLE_ERROR:
        return
    assert loop.source is not None
    assert loop.source.settle is not None
    told: list[Settlement] = [settled.popleft() for _ in range(len(settled))]
    reply = yield from ask(loop, loop.source.settle, loop.source.settle.call, (told,), insist=True)
    if type(reply) is Failed and loop.out_of_time() and not reply.exits:
        # Not the source's fault. It is told again with the last words, which have no time limit.
        settled.extendleft(reversed(told))
        return
    if type(reply) is Failed:
        error = SettlementException(f"{len(told)} outcomes could not be settled: {text_of(reply.error)}")
        error.__cause__ = reply.error
        fail(loop, StopReason.SETTLE_ERROR, error)
        return
    for settlement in told:
        loop.open.pop(id(settlement.transaction), None)


def extend(loop: Loop) -> Script[None]:
    """Keep every delivery that is not settled yet."""
    source = loop.source
    assert source is not None
    loop.extend_due = loop.ports.now() + source.lease / 3
    if source.extend is None or not loop.open:
        return
    reply = yield from ask(loop, source.extend, source.extend.call, (list(loop.open.values()),))
    if type(reply) is Failed:
        # The next round may still be in time, and if not, redelivery is what leases are for.
        logger.error(
            "leases of %d transactions could not be extended: %s", len(loop.open), text_of(reply.error)
        )
