"""The two loops: take transactions, keep the slots busy, settle with the source, end for a reason.

    consume:  fetch ─► submit ─► attend (settle, extend leases) ─► fetch …
    produce:  next batch of the caller's iterable ─► submit ─► attend ─► …

`StopReason` lists the ways a loop ends. Work in flight finishes first, unless time has run out: then attempts in
flight are interrupted, and their transactions abandoned unsettled.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Any

from onceward.backoff import Backoff
from onceward.task.exceptions import (
    ExceptionCategory,
    FetchException,
    FetchTimeoutException,
    InputException,
    failure_category,
)
from onceward.task.lifecycle import text_of
from onceward.task.mixins.policies import ConsumerLoopPolicy
from onceward.task.report import StopReason
from onceward.task.script import Failed, Script, TimeLimit
from onceward.task.slots import Slots
from onceward.task.source import (
    Loop,
    ask,
    await_work,
    batch_problem,
    chores,
    fail,
    logger,
    patience,
    rest,
    return_unbegun,
    settle,
)
from onceward.telemetry.context import current_work
from onceward.transaction import Settlement, Transaction, Verdict

LANDING = 0.25
"""Seconds interrupted attempts get to end after the loop has run out of time."""
HEAD_START = 0.001
"""Seconds in which a few messages may begin, and perhaps end, before the loop asks an idle source for more."""
PATIENCE = 30.0
"""Seconds a suspect waits for what is in flight. One of these may be stuck; the suspect is then given back as long."""


def consume(loop: Loop) -> Script[StopReason]:
    """Fetch and process until there is a reason to end."""
    current_work.set(loop)
    policy = loop.policy
    assert isinstance(policy, ConsumerLoopPolicy)
    low_water = 2 * loop.slots.size - 1 if policy.mode == "continuous" else 0
    loop.slots.wake_at = low_water
    empties = 0
    while True:
        reason = loop.ending()
        size = loop.room()
        if reason is None and size == 0:
            reason = StopReason.LIMIT
        if reason is not None:
            break
        in_flight = loop.source is not None and loop.source.prompt and loop.slots.pending > 0
        batch = yield from fetch(loop, size)
        if batch is None:
            continue
        if batch:
            empties = 0
            if is_suspect(loop, batch):
                loop.slots.wake_at = 0
                yield from run_alone(loop, batch)
                loop.slots.wake_at = low_water
            else:
                loop.submit(batch)
                if low_water and len(batch) < size and loop.slots.pending <= loop.slots.size:
                    loop.slots.wake_at = 0
                    yield from let_begin(loop)
                    loop.slots.wake_at = low_water
                yield from attend(loop, low_water)
            continue
        if not policy.streaming:
            if (
                in_flight or loop.slots.pending > 0
            ):  # what is in flight may make more available, for instance of its key
                loop.slots.wake_at = 0
                yield from attend(loop, 0)
                loop.slots.wake_at = low_water
                continue
            reason = StopReason.EMPTY
            break
        queue = policy.empty_queue
        delay = Backoff(queue.backoff, queue.backoff_multiplier, queue.backoff_cap).delay(empties)
        # A policy that says how to wait is followed to the letter.
        if loop.source is None or loop.source.wait is None or "empty_queue" in policy.model_fields_set:
            yield from rest(loop, delay)
        else:
            yield from await_work(loop, delay)
        empties += 1
    return (yield from finish(loop, reason))


def produce(loop: Loop, take: Batches | AsyncBatches) -> Script[StopReason]:
    """Produce what `take` returns, batch by batch, until there is a reason to end."""
    current_work.set(loop)
    while True:
        reason = loop.ending()
        if reason is None and loop.room() == 0:
            reason = StopReason.LIMIT
        if reason is not None:
            break
        loop.step = "input"
        batch = yield loop.ports.invoke, (loop, take, (loop.room(),), None)
        if type(batch) is Failed:
            loop.slots.unstarted.extend(take.held)
            if batch.exits:
                loop.slots.exited = loop.slots.exited or batch.error
            elif batch.limit is not TimeLimit.LOOP:
                fail(loop, StopReason.INPUT_ERROR, input_error(batch.error))
            continue
        if not batch:
            reason = StopReason.DONE
            break
        loop.submit(batch)
        yield from attend(loop, 0)
    return (yield from finish(loop, reason))


def input_error(error: BaseException | None) -> InputException:
    wrapped = InputException(f"the iterable of transactions raised {text_of(error)}")
    wrapped.__cause__ = error
    return wrapped


def fetch(loop: Loop, size: int) -> Script[Sequence[Transaction] | None]:
    """Fetch one batch under the fetch policy. None if the loop has a reason to end instead."""
    source = loop.source
    assert source is not None
    if source.prompt:
        yield from settle(loop)

    def call(*arguments: Any) -> Any:
        # A connector may change its arguments; the policy must stay the same.
        return source.fetch.call(*arguments, **copy.deepcopy(source.extra))

    check = partial(batch_problem, size=size)
    reply = yield from ask(
        loop, source.fetch, call if source.extra else source.fetch.call, (size,), check=check
    )
    if type(reply) is Failed:
        if reply.exits:
            return None
        if reply.limit is not TimeLimit.LOOP and loop.ending() is None:
            fail(loop, StopReason.FETCH_ERROR, fetch_error(reply))
        else:
            logger.warning("the last fetch failed while the loop was ending: %s", text_of(reply.error))
        return None
    batch: Sequence[Transaction] = () if reply is None else reply
    loop.slots.tally.fetches += 1
    loop.slots.tally.empty_fetches += not batch
    if loop.watch is not None:
        loop.watch.record_fetch(empty=not batch)
    problem = check(batch)
    if problem:
        fail(loop, StopReason.FETCH_ERROR, FetchException(problem))
        return None
    return batch


def fetch_error(reply: Failed) -> FetchException:
    """The error that the caller of the loop gets for a failed fetch."""
    if isinstance(reply.error, FetchException):
        return reply.error
    timed_out = (
        reply.limit is not None
        or any(cls.__name__ == "TimeoutError" for cls in type(reply.error).__mro__)  # redis-py has its own
        or failure_category(reply.error) is ExceptionCategory.TIMEOUT
    )
    cls = FetchTimeoutException if timed_out else FetchException
    error = cls(f"fetching gave up: {text_of(reply.error)}")
    error.__cause__ = reply.error
    return error


def is_suspect(loop: Loop, batch: Sequence[Transaction]) -> bool:
    source = loop.source
    return len(batch) == 1 and source is not None and bool(source.is_suspect and source.is_suspect(batch[0]))


def run_alone(loop: Loop, batch: Sequence[Transaction]) -> Script[None]:
    """Let what is in flight end, run these, and wait for their end."""
    loop.keep(batch)
    yield from attend(loop, 0, loop.ports.now() + PATIENCE)
    if loop.slots.pending > 0 or loop.ending() is not None:
        return_unbegun(loop, batch, 0.0 if loop.ending() is not None else PATIENCE)
        return
    loop.submit(batch)
    yield from attend(loop, 0)


def let_begin(loop: Loop) -> Script[None]:
    """Let the workers go first: every message has a slot, and the source has probably nothing more.

    The code of the next fetch would keep the interpreter, or the event loop, from a handler that could run already.
    What is quick has ended by then, and is settled at once.
    """
    if loop.slots.pending > 0:
        yield loop.ports.park, (HEAD_START,)


def attend(loop: Loop, low_water: int, until: float = inf) -> Script[None]:
    """Wait until at most `low_water` transactions are pending, the loop has a reason to end, or it is time."""
    yield from chores(loop)
    while loop.slots.pending > low_water and loop.ending() is None and (now := loop.ports.now()) < until:
        yield loop.ports.park, (min(patience(loop), until - now),)
        yield from chores(loop)
    if loop.watch is not None:
        loop.watch.count_successes()
    if loop.slots.pending <= 0:
        yield from settle(loop)


def finish(loop: Loop, reason: StopReason) -> Script[StopReason]:
    """Let work in flight end, give back what was not started, and settle."""
    slots = loop.slots
    slots.wake_at = 0
    if reason in (StopReason.INTERRUPTED, StopReason.SETTLE_ERROR) or (
        reason is StopReason.STOPPED and loop.returnable
    ):
        slots.close()
    while slots.pending > 0 and not loop.out_of_time():
        if loop.ending() is not None:
            loop.ports.end_postponements()
        if loop.hurried:
            slots.close()
        # Right away: work in flight may take long or never end, and another consumer could start on these.
        return_unstarted(slots)
        yield from chores(loop)
        yield loop.ports.park, (patience(loop),)
        if slots.exited is not None:
            slots.close()
    if slots.pending > 0:
        reason = StopReason.TIMEOUT
        slots.close()
        loop.deadline = loop.ports.now() + LANDING
        while slots.pending > 0 and not loop.out_of_time():
            yield loop.ports.park, (patience(loop),)
        slots.tally.abandoned += max(slots.pending, 0)
    yield from give_back(loop)
    if slots.exited is not None:
        return StopReason.INTERRUPTED
    return loop.reason or reason


def give_back(loop: Loop) -> Script[None]:
    """Settle for the last time: what has ended, and what was never started."""
    slots = loop.slots
    loop.deadline = inf
    return_unstarted(slots)
    if slots.settled is not None:
        # Stuck attempts may never end, but the call does: settle their outcomes now.
        slots.settled.extend(slots.deferred.values())
        slots.deferred.clear()
        yield from settle(loop)


def return_unstarted(slots: Slots) -> None:
    unstarted = slots.take_unstarted()
    if slots.settled is not None:
        slots.settled.extend(Settlement(transaction, Verdict.RETURNED) for transaction in unstarted)


class _Input:
    """The caller's iterable, in batches. If it raises, its items so far are returned first; the next call raises."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self.held: list[Transaction] = []
        """Items taken by the last call. If it was cut off, nothing else has them, even if it returned them late."""

    def _begin(self) -> list[Transaction]:
        self.held = []
        if self._error is not None:
            raise self._error
        return self.held

    def _defer(self, error: Exception) -> None:
        if not self.held:
            raise error
        self._error = error


class Batches(_Input):
    """Returns the next `size` transactions."""

    def __init__(self, transactions: Iterable[Transaction]) -> None:
        super().__init__()
        self._iterator = iter(transactions)

    def __call__(self, size: int) -> list[Transaction]:
        taken = self._begin()
        try:
            for item in islice(self._iterator, size):
                taken.append(_check_transaction(item))
        except Exception as error:  # noqa: BLE001
            self._defer(error)
        return taken


class AsyncBatches(_Input):
    """Returns the next `size` transactions, in asyncio, from an iterable or an async iterable."""

    def __init__(self, transactions: Iterable[Transaction] | AsyncIterable[Transaction]) -> None:
        super().__init__()
        self._iterator = aiter(
            transactions if isinstance(transactions, AsyncIterable) else _each(transactions)
        )

    async def __call__(self, size: int) -> list[Transaction]:
        taken = self._begin()
        try:
            while len(taken) < size:
                taken.append(_check_transaction(await anext(self._iterator)))
        except StopAsyncIteration:
            pass
        except Exception as error:  # noqa: BLE001
            self._defer(error)
        return taken


async def _each(transactions: Iterable[Transaction]) -> AsyncIterator[Transaction]:
    for transaction in transactions:
        yield transaction


def _check_transaction(item: Any) -> Transaction:
    if not isinstance(item, Transaction):
        raise TypeError(f"expected a Transaction, got {type(item).__name__}; wrap it: Transaction(payload=…)")
    return item
