"""The loop around outgoing lifecycles: batches, slots, limits, endings, and one instance shared by many callers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from onceward import Transaction, cancel_requested
from onceward.errors import ConfigurationError
from onceward.task.exceptions import (
    ExceptionCategory,
    InputException,
    LoopError,
    ProducerLoopTimeoutException,
)
from onceward.task.mixins.policies import ProducerPolicy
from onceward.task.report import Report, StopReason
from onceward.task.settings import EngineSettings
from tests.support.wait import until, until_async
from tests.support.world import (
    SHORT,
    After,
    Until,
    World,
    business,
    producing,
    results,
    retry,
    system,
    transactions,
)

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory
FOREVER = Until(lambda: False)
LONG = 15.0
"""Seconds in which a loaded machine finishes anything that is not stuck."""


class Gauge:
    """What runs now, what ran, and how many at once."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.started: list[Any] = []
        self.ended: list[Any] = []
        self.peak = 0
        self.ids_together: list[tuple[str, ...]] = []
        self._lock = threading.Lock()

    def around(self, wait: Callable[[Transaction], Any] = lambda _: None) -> Callable[[Transaction], Any]:
        """A behavior that is counted from its beginning until what `wait` waits for."""

        def behaviour(transaction: Transaction) -> Any:
            token = object()
            with self._lock:
                self.running.add(id(token))
                self.started.append(transaction.payload)
                self.peak = max(self.peak, len(self.running))
            given = wait(transaction)
            condition = given.condition if isinstance(given, Until) else lambda: True

            def over(began: float = time.monotonic()) -> bool:
                if isinstance(given, After) and time.monotonic() - began < given.seconds:
                    return False
                if not condition():
                    return False
                with self._lock:
                    self.running.discard(id(token))
                    self.ended.append(transaction.payload)
                return True

            return Until(over, limit=LONG)

        return behaviour


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-09")
def test_at_concurrency_one_the_input_is_produced_in_its_order(world: World) -> None:
    report = world.produce(world.producer(), transactions(25), producing(batch=4))
    assert world.calls == [("produce", f"t{number}") for number in range(25)]
    assert (report.succeeded, report.stop_reason) == (25, StopReason.DONE)


@pytest.mark.req("PE-09")
def test_a_batch_begins_when_every_transaction_of_the_one_before_has_ended(world: World) -> None:
    gauge = Gauge()
    seen: list[set[int]] = []

    def wait(transaction: Transaction) -> Any:
        seen.append({number // 3 for number in set(gauge.started) - set(gauge.ended)})
        # The first of each batch is the slowest, so the next batch has every opportunity to begin too early.
        return After(0.1) if transaction.payload % 3 == 0 else None

    world.produce(world.producer(gauge.around(wait)), transactions(9), producing(batch=3, concurrency=9))
    assert seen.count({0}) == seen.count({1}) == seen.count({2}) == 3


@pytest.mark.req("PE-09")
@pytest.mark.parametrize(("count", "size"), [(0, 3), (1, 3), (3, 3), (4, 3), (7, 3), (5, 1)])
def test_every_transaction_of_a_ragged_input_is_produced_once(world: World, count: int, size: int) -> None:
    report = world.produce(world.producer(), transactions(count), producing(batch=size, concurrency=2))
    assert Counter(id for _, id in world.calls) == {f"t{number}": 1 for number in range(count)}
    assert (report.processed, report.stop_reason) == (count, StopReason.DONE)


@pytest.mark.req("PE-09", "PE-18")
def test_the_input_is_not_read_ahead_of_the_batch_in_hand(world: World) -> None:
    handed_out: list[int] = []
    ahead: list[int] = []

    def source() -> Iterator[Transaction]:
        for transaction in transactions(20):
            handed_out.append(1)
            yield transaction

    task = world.producer(lambda transaction: ahead.append(len(handed_out) - transaction.payload))
    world.produce(task, source(), producing(batch=4))
    assert len(ahead) == 20
    assert max(ahead) <= 4


# ── slots ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-10")
@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_concurrency_is_reached_and_never_exceeded(world: World, concurrency: int) -> None:
    gauge = Gauge()
    first = range(concurrency)

    def wait(transaction: Transaction) -> Any:
        if transaction.payload in first:
            return Until(lambda: len(gauge.started) >= concurrency)
        return After(0.002)

    policy = producing(batch=20, concurrency=concurrency)
    report = world.produce(world.producer(gauge.around(wait)), transactions(40), policy)
    assert (report.succeeded, gauge.peak) == (40, concurrency)


@pytest.mark.req("PE-10")
def test_one_slow_transaction_does_not_idle_the_other_slot_of_its_batch(world: World) -> None:
    gauge = Gauge()

    def wait(transaction: Transaction) -> Any:
        return Until(lambda: len(gauge.ended) == 9) if transaction.payload == 0 else None

    report = world.produce(
        world.producer(gauge.around(wait)), transactions(10), producing(batch=10, concurrency=2)
    )
    assert report.succeeded == 10
    assert gauge.ended[-1] == 0


@pytest.mark.req("PE-10")
def test_retries_and_backoff_stay_inside_the_slot(world: World) -> None:
    gauge = Gauge()
    task = world.producer(gauge.around(lambda _: None), success=results(system()), exception=lambda *_: None)
    policy = producing(batch=8, concurrency=2, success=retry(2, backoff=0.01))
    assert world.produce(task, transactions(8), policy).failed == 8
    assert gauge.peak <= 2


@pytest.mark.req("PE-10")
def test_a_first_batch_smaller_than_the_concurrency_does_not_narrow_later_ones(world: World) -> None:
    # Two calls of one instance: the second needs all four slots at once.
    gauge = Gauge()
    task = world.producer(gauge.around(lambda _: Until(lambda: len(gauge.started) in (1, 5))))
    world.produce(task, transactions(1), producing(concurrency=4))
    assert world.produce(task, transactions(4, start=1), producing(concurrency=4)).succeeded == 4


# ── identity ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-11")
def test_no_transaction_is_produced_twice_at_any_concurrency(world: World) -> None:
    report = world.produce(world.producer(), transactions(500), producing(batch=50, concurrency=8))
    assert Counter(id for _, id in world.calls) == {f"t{number}": 1 for number in range(500)}
    assert report.succeeded == 500


def same_id(count: int, id: str = "same") -> list[Transaction]:
    return [Transaction(id=id, payload=number) for number in range(count)]


@pytest.mark.req("PE-11")
def test_two_transactions_with_one_id_run_one_after_the_other(world: World) -> None:
    gauge = Gauge()
    given = same_id(4)
    report = world.produce(
        world.producer(gauge.around(lambda _: After(0.01))), given, producing(batch=4, concurrency=4)
    )
    assert (report.succeeded, gauge.peak) == (4, 1)
    assert gauge.started == [0, 1, 2, 3]


@pytest.mark.req("PE-11")
def test_an_id_in_flight_holds_up_no_other_id(world: World) -> None:
    done: list[str] = []
    first, second, *others = [*same_id(2), *transactions(6)]

    def produce(transaction: Transaction) -> Any:
        if transaction is first:
            return Until(lambda: len(done) == 6)
        done.append(transaction.id)
        return None

    report = world.produce(
        world.producer(produce), [first, second, *others], producing(batch=8, concurrency=2)
    )
    assert report.succeeded == 8
    assert done[-1] == "same"


@pytest.mark.req("PE-11")
def test_an_id_is_held_through_retries_and_handlers(world: World) -> None:
    order: list[tuple[str, int]] = []
    play = results(system(), None, None)

    def produce(transaction: Transaction) -> Any:
        order.append(("produce", transaction.payload))
        return play()

    def success(transaction: Transaction, _: Any) -> Any:
        order.append(("success", transaction.payload))
        return After(0.01)

    policy = producing(concurrency=2, produce=retry(2, backoff=0.01))
    world.produce(world.producer(produce, success=success), same_id(2), policy)
    assert order == [("produce", 0), ("produce", 0), ("success", 0), ("produce", 1), ("success", 1)]


@pytest.mark.req("PE-11", "PE-21")
def test_two_calls_of_one_instance_never_run_one_id_at_once(world: World) -> None:
    gauge = Gauge()
    task = world.producer(gauge.around(lambda _: After(0.01)))
    calls = [(task.produce_transactions, same_id(5), producing(concurrency=3)) for _ in range(3)]
    reports = world.run_together(*calls)
    assert [report.succeeded for report in reports] == [5, 5, 5]
    assert gauge.peak == 1


@pytest.mark.req("PE-11", "PE-21")
def test_a_call_that_gave_up_waiting_for_an_id_does_not_keep_it_from_the_next(world: World) -> None:
    """Three calls want one id: the first has it, the second times out, the third waits and gets it."""
    ended: list[str] = []
    handed_out: list[str] = []

    def stands_in_line(name: str) -> Callable[[], bool]:
        """Was delivered a while ago, so it waits for the id."""
        since: list[float] = []

        def condition() -> bool:
            if name in handed_out:
                since.append(time.monotonic())
            return bool(since) and since[-1] - since[0] > 0.2

        return condition

    third_waits = stands_in_line("third")

    def produce(transaction: Transaction) -> Any:
        if transaction.payload == "first":
            return Until(lambda: third_waits() and "second" in ended, limit=LONG)
        return None

    task = world.producer(produce)

    def given(name: str, ready: Callable[[], bool]) -> Any:
        def source() -> Iterator[Transaction]:
            until(ready)
            handed_out.append(name)
            yield Transaction(id="same", payload=name)

        async def source_async() -> AsyncIterator[Transaction]:
            await until_async(ready)
            handed_out.append(name)
            yield Transaction(id="same", payload=name)

        return source_async() if world.asynchronous else source()

    async def call_async(name: str, ready: Callable[[], bool], policy: ProducerPolicy) -> Any:
        try:
            return await task.produce_transactions(given(name, ready), policy)
        finally:
            ended.append(name)

    def call(name: str, ready: Callable[[], bool], policy: ProducerPolicy) -> Any:
        try:
            return task.produce_transactions(given(name, ready), policy)
        finally:
            ended.append(name)

    method = call_async if world.asynchronous else call
    first, second, third = world.run_together(
        (method, "first", lambda: True, producing()),
        (method, "second", stands_in_line("first"), producing(timeout=1.5)),
        (method, "third", stands_in_line("second"), producing(timeout=LONG)),
    )
    assert isinstance(second, ProducerLoopTimeoutException)
    assert isinstance(first, Report)
    assert isinstance(third, Report), third
    assert third.succeeded == 1


# ── time limits ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-12")
def test_transaction_timeout_bounds_every_lifecycle_by_itself(world: World) -> None:
    task = world.producer(lambda transaction: FOREVER if transaction.payload % 2 else None)
    report = world.produce(task, transactions(6), producing(transaction_timeout=SHORT))
    assert report.failed_by_category == {BUSINESS: 0, SYSTEM: 0, TIMEOUT: 3}
    assert (report.succeeded, report.timed_out) == (3, 3)


@pytest.mark.req("PE-12")
def test_transaction_timeout_counts_retries_and_backoff(world: World) -> None:
    task = world.producer(results(system()), exception=lambda *_: None)
    policy = producing(produce=retry(1000, backoff=0.05, backoff_multiplier=1.0), transaction_timeout=SHORT)
    report = world.produce(task, transactions(1), policy)
    [(_, error)] = world.errors
    assert error.category is TIMEOUT
    assert 1 <= report.retries < 1000


@pytest.mark.req("PE-12")
def test_the_exception_handler_of_a_timed_out_lifecycle_has_its_own_time(world: World) -> None:
    reached: list[str] = []
    task = world.producer(
        lambda _: FOREVER,
        exception=lambda *_: Until(results(*[False] * 40, True), reached.append("handled"), limit=LONG),
    )
    report = world.produce(task, transactions(1), producing(transaction_timeout=0.02))
    assert reached == ["handled"]
    assert report.failed_by_category[TIMEOUT] == report.timed_out == 1


@pytest.mark.req("PE-12")
def test_loop_timeout_is_a_plain_timeout_error_that_carries_the_report(world: World) -> None:
    task = world.producer(lambda transaction: FOREVER if transaction.payload == 2 else None)
    with pytest.raises(TimeoutError) as raised:
        world.produce(task, transactions(10), producing(batch=5, timeout=4 * SHORT))
    assert isinstance(raised.value, ProducerLoopTimeoutException)
    report = raised.value.report
    assert report is not None
    assert (report.succeeded, report.abandoned, report.unstarted) == (2, 1, 2)
    assert report.stop_reason is StopReason.TIMEOUT
    assert report.duration >= 4 * SHORT


@pytest.mark.req("PE-12", "PE-13")
def test_loop_timeout_starts_nothing_more(world: World) -> None:
    task = world.producer(lambda _: FOREVER)
    with pytest.raises(ProducerLoopTimeoutException):
        world.produce(task, transactions(10), producing(batch=4, concurrency=2, timeout=2 * SHORT))
    assert Counter(step for step, _ in world.calls) == {"produce": 2}


@pytest.mark.req("PE-12")
def test_loop_timeout_cuts_a_backoff_short(world: World) -> None:
    task = world.producer(results(system()), exception=lambda *_: None)
    began = time.monotonic()
    with pytest.raises(ProducerLoopTimeoutException):
        world.produce(task, transactions(1), producing(produce=retry(2, backoff=60.0), timeout=0.2))
    assert time.monotonic() - began < LONG
    assert world.errors == []


@pytest.mark.req("PE-12")
def test_loop_timeout_bounds_an_input_that_yields_nothing(world: World) -> None:
    released = threading.Event()

    def source() -> Iterator[Transaction]:
        yield from transactions(2)
        released.wait(LONG)

    async def source_async() -> AsyncIterator[Transaction]:
        for transaction in transactions(2):
            yield transaction
        await asyncio.sleep(LONG)

    began = time.monotonic()
    # The test must not wait for the blocked iterable forever.
    timer = threading.Timer(LONG, released.set)
    timer.start()
    try:
        given: Any = source_async() if world.asynchronous else source()
        with pytest.raises(ProducerLoopTimeoutException) as raised:
            world.produce(world.producer(), given, producing(batch=2, timeout=2 * SHORT))
        assert time.monotonic() - began < LONG / 2
        assert raised.value.report is not None
        assert raised.value.report.succeeded == 2
    finally:
        released.set()
        timer.cancel()


@pytest.mark.req("PE-12")
def test_loop_timeout_loses_no_transaction_of_a_batch_that_was_not_full_yet(world: World) -> None:
    def source() -> Iterator[Transaction]:
        yield from transactions(3)
        until(cancel_requested)

    async def source_async() -> AsyncIterator[Transaction]:
        for transaction in transactions(3):
            yield transaction
        await asyncio.sleep(LONG)

    given: Any = source_async() if world.asynchronous else source()
    with pytest.raises(ProducerLoopTimeoutException) as raised:
        world.produce(world.producer(), given, producing(batch=10, timeout=2 * SHORT))
    report = raised.value.report
    assert report is not None
    assert report.processed + report.unstarted == 3


@pytest.mark.req("PE-12")
def test_loop_timeout_does_not_wait_for_an_attempt_that_cannot_be_interrupted(world: World) -> None:
    released = threading.Event()
    in_async: list[asyncio.Event] = []

    def produce(_: Transaction) -> Any:
        released.wait(LONG)

    async def produce_async(*_: Any) -> Any:
        in_async.append(asyncio.Event())
        while not released.is_set():
            try:
                await asyncio.wait_for(in_async[0].wait(), LONG)
            except asyncio.CancelledError:
                continue
            return

    task = world.producer(produce)
    if world.asynchronous:
        type(task).produce_transaction = produce_async
    began = time.monotonic()
    took: list[float] = []

    def call() -> Any:
        try:
            return task.produce_transactions(transactions(1), producing(timeout=2 * SHORT))
        finally:
            took.append(time.monotonic() - began)
            released.set()

    async def call_async() -> Any:
        try:
            return await task.produce_transactions(transactions(1), producing(timeout=2 * SHORT))
        finally:
            took.append(time.monotonic() - began)
            released.set()
            in_async[0].set()

    with pytest.raises(ProducerLoopTimeoutException) as raised:
        world.run(call_async if world.asynchronous else call)
    assert took[0] < LONG / 2
    assert raised.value.report is not None
    assert raised.value.report.abandoned == 1


@pytest.mark.req("PE-12")
@pytest.mark.parametrize(
    ("policy", "category"),
    [
        (producing(produce=retry(1, timeout=0.1), transaction_timeout=LONG, timeout=2 * LONG), "attempt 1"),
        (producing(produce=retry(1, timeout=LONG), transaction_timeout=0.1, timeout=2 * LONG), "lifecycle"),
    ],
    ids=["step", "transaction"],
)
def test_the_shorter_of_two_limits_fires_and_says_which_it_was(
    world: World, policy: ProducerPolicy, category: str
) -> None:
    task = world.producer(lambda _: FOREVER, exception=lambda *_: None)
    world.produce(task, transactions(1), policy)
    [(_, error)] = world.errors
    assert category in error.message


@pytest.mark.req("PE-12")
def test_a_loop_that_ends_in_time_raises_nothing(world: World) -> None:
    report = world.produce(
        world.producer(), transactions(20), producing(timeout=LONG, transaction_timeout=LONG)
    )
    assert (report.succeeded, report.timed_out) == (20, 0)


# ── endings ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-13")
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("batch", [1, 3, 50])
@pytest.mark.parametrize("limit", [1, 7, 30])
def test_the_limit_is_met_and_never_exceeded(world: World, limit: int, batch: int, concurrency: int) -> None:
    policy = producing(batch=batch, concurrency=concurrency, limit=limit)
    report = world.produce(world.producer(), transactions(40), policy)
    assert len(world.calls) == report.processed == limit
    assert report.stop_reason is StopReason.LIMIT


@pytest.mark.req("PE-13")
def test_no_more_is_taken_from_the_input_than_the_limit_allows(world: World) -> None:
    left = iter(transactions(10))
    world.produce(world.producer(), left, producing(batch=4, limit=6))
    assert [transaction.id for transaction in left] == ["t6", "t7", "t8", "t9"]


@pytest.mark.req("PE-13")
def test_a_limit_of_zero_starts_nothing(world: World) -> None:
    left = iter(transactions(3))
    report = world.produce(world.producer(), left, producing(limit=0))
    assert (report.processed, report.stop_reason, world.calls) == (0, StopReason.LIMIT, [])
    assert len(list(left)) == 3


@pytest.mark.req("PE-13")
def test_failures_count_towards_the_limit(world: World) -> None:
    report = world.produce(world.producer(results(business())), transactions(9), producing(limit=5))
    assert (report.failed, report.stop_reason) == (5, StopReason.LIMIT)


@pytest.mark.req("PE-13")
def test_an_empty_input_is_done_at_once(world: World) -> None:
    report = world.produce(world.producer(), [])
    assert (report.processed, report.stop_reason) == (0, StopReason.DONE)


@pytest.mark.req("PE-13")
def test_an_input_shorter_than_the_limit_is_done(world: World) -> None:
    report = world.produce(world.producer(), transactions(3), producing(limit=10))
    assert (report.succeeded, report.stop_reason) == (3, StopReason.DONE)


def test_stop_lets_work_in_flight_finish_and_begins_no_batch(world: World) -> None:
    task: Any = None

    def produce(transaction: Transaction) -> None:
        if transaction.payload == 1:
            task.stop()

    task = world.producer(produce, success=lambda *_: None)
    report = world.produce(task, transactions(30), producing(batch=3))
    assert report.stop_reason is StopReason.STOPPED
    assert world.steps_of("t1") == ["produce", "success"]
    assert not any(int(id[1:]) >= 3 for _, id in world.calls)
    assert report.processed + report.unstarted == 3


def test_nothing_is_started_after_stop(world: World) -> None:
    task: Any = None

    def produce(transaction: Transaction) -> None:
        if transaction.payload == 1:
            task.stop()

    task = world.producer(produce)
    report = world.produce(task, transactions(30), producing(batch=10))
    assert [id for _, id in world.calls] == ["t0", "t1"]
    assert report.unstarted == 8


def test_stop_before_a_call_ends_that_call_and_only_that(world: World) -> None:
    task = world.producer()
    task.stop()
    stopped = world.produce(task, transactions(3))
    assert (stopped.processed, stopped.stop_reason) == (0, StopReason.STOPPED)
    assert world.produce(task, transactions(3)).succeeded == 3


def test_stop_from_another_thread_ends_an_endless_call(world: World) -> None:
    task = world.producer()

    def stop_when_it_runs() -> None:
        until(lambda: len(world.calls) >= 20)
        task.stop()

    stopper = threading.Thread(target=stop_when_it_runs)
    stopper.start()
    report = world.produce(task, (Transaction(payload=None) for _ in iter(int, 1)))
    stopper.join()
    assert report.stop_reason is StopReason.STOPPED
    assert report.succeeded > 0


def test_stop_as_often_as_you_like_is_one_stop(world: World) -> None:
    task: Any = None

    def produce(_: Transaction) -> None:
        for _ in range(5):
            task.stop()

    task = world.producer(produce)
    assert world.produce(task, transactions(1)).processed == 1
    assert world.produce(task, transactions(1)).processed == 1


# ── the input ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("make", [list, tuple, iter, lambda items: dict(enumerate(items)).values()])
def test_any_iterable_of_transactions_will_do(world: World, make: Callable[[Any], Any]) -> None:
    assert world.produce(world.producer(), make(transactions(12)), producing(batch=5)).succeeded == 12


async def _as_async(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        await asyncio.sleep(0)
        if isinstance(item, BaseException):
            raise item
        yield item


def _as_sync(items: list[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, BaseException):
            raise item
        yield item


def test_an_asynchronous_task_takes_an_asynchronous_iterable() -> None:
    world = World("asyncio")
    given: Any = _as_async(transactions(11))
    report = world.produce(world.producer(), given, producing(batch=4))
    assert (report.succeeded, report.stop_reason) == (11, StopReason.DONE)
    assert [id for _, id in world.calls] == [f"t{number}" for number in range(11)]


def test_a_threaded_task_refuses_an_asynchronous_iterable_and_says_what_it_takes() -> None:
    world = World("threads")
    given: Any = _as_async(transactions(1))
    with pytest.raises(ConfigurationError, match="iterable of Transaction"):
        world.produce(world.producer(), given)


def test_the_limit_is_obeyed_with_an_asynchronous_iterable() -> None:
    world = World("asyncio")
    taken: list[str] = []

    async def source() -> AsyncIterator[Transaction]:
        for transaction in transactions(10):
            taken.append(transaction.id)
            yield transaction

    given: Any = source()
    assert world.produce(world.producer(), given, producing(batch=2, limit=5)).succeeded == 5
    assert len(taken) == 5


INPUTS = [("threads", _as_sync), ("asyncio", _as_sync), ("asyncio", _as_async)]


@pytest.mark.parametrize(("mode", "source"), INPUTS, ids=["threads", "asyncio", "asyncio, async iterable"])
class TestAnInputThatFails:
    def test_raises_an_input_exception_with_cause_and_report(self, mode: str, source: Any) -> None:
        world, broken = World(mode), OSError("disk gone")
        given = source([*transactions(4), broken])
        with pytest.raises(InputException, match="disk gone") as raised:
            world.produce(world.producer(), given, producing(batch=2))
        assert raised.value.cause is broken
        assert isinstance(raised.value, LoopError)
        report = raised.value.report
        assert report is not None
        assert (report.succeeded, report.stop_reason) == (4, StopReason.INPUT_ERROR)

    def test_finishes_what_is_in_flight(self, mode: str, source: Any) -> None:
        world = World(mode)
        task = world.producer(lambda _: After(0.01), success=lambda *_: None)
        with pytest.raises(InputException):
            world.produce(task, source([*transactions(4), OSError()]), producing(batch=2, concurrency=2))
        assert [world.steps_of(f"t{number}") for number in range(4)] == [["produce", "success"]] * 4

    def test_loses_no_transaction_it_handed_out_before(self, mode: str, source: Any) -> None:
        world = World(mode)
        with pytest.raises(InputException) as raised:
            world.produce(world.producer(), source([*transactions(3), OSError()]), producing(batch=10))
        report = raised.value.report
        assert report is not None
        assert report.processed + report.unstarted == 3

    @pytest.mark.parametrize("item", [{"id": "x"}, "text", None, 7, Transaction])
    def test_by_yielding_something_else_says_so(self, mode: str, source: Any, item: Any) -> None:
        world = World(mode)
        with pytest.raises(InputException, match=type(item).__name__) as raised:
            world.produce(world.producer(), source([*transactions(2), item]), producing(batch=2))
        assert isinstance(raised.value.cause, TypeError)
        assert raised.value.report is not None
        assert raised.value.report.succeeded == 2

    def test_leaves_the_task_fit_for_the_next_call(self, mode: str, source: Any) -> None:
        world = World(mode)
        task = world.producer()
        with pytest.raises(InputException):
            world.produce(task, source([OSError()]))
        assert world.produce(task, source(transactions(3))).succeeded == 3


@pytest.mark.parametrize("given", [Transaction(), "text", b"bytes", {"id": "x"}, None, 7, object()])
def test_an_input_that_is_no_iterable_of_transactions_is_refused_at_once(world: World, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"iterable of Transaction, not {type(given).__name__}"):
        world.produce(world.producer(), given)
    assert world.calls == []


@pytest.mark.parametrize("given", ["text", None, {"id": "x"}, [Transaction()]])
def test_a_lifecycle_of_something_else_than_a_transaction_is_refused(world: World, given: Any) -> None:
    with pytest.raises((ConfigurationError, InputException, TypeError), match="Transaction"):
        world.run(world.producer().start_producing, given)
    assert world.calls == []


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────


class Counted:
    alive = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        with Counted.lock:
            Counted.alive += 1

    def __del__(self) -> None:
        with Counted.lock:
            Counted.alive -= 1


@pytest.mark.req("PE-18")
def test_of_many_transactions_no_more_than_about_a_batch_is_alive_at_once(world: World) -> None:
    count, batch, concurrency = 200_000, 100, 4
    base, peak = Counted.alive, 0

    def source() -> Iterator[Transaction]:
        nonlocal peak
        for number in range(count):
            peak = max(peak, Counted.alive - base)
            yield Transaction(id=f"t{number}", payload=Counted())

    # Not `world.producer`, which records every call and would itself fill the memory.
    produced = 0

    def produce(_: Transaction) -> None:
        nonlocal produced
        produced += 1

    task = world.producer()
    type(task).produce_transaction = world.handler(produce)
    report = world.produce(task, source(), producing(batch=batch, concurrency=concurrency))
    assert report.succeeded == count
    assert peak <= 2 * batch + 2 * concurrency
    gc.collect()
    assert Counted.alive - base <= 1


@pytest.mark.req("PE-18")
def test_an_ended_transaction_is_freed_without_the_help_of_the_garbage_collector(world: World) -> None:
    base, peak = Counted.alive, 0

    def source() -> Iterator[Transaction]:
        nonlocal peak
        for _ in range(2000):
            peak = max(peak, Counted.alive - base)
            yield Transaction(payload=Counted())

    task = world.producer()
    type(task).produce_transaction = world.handler(lambda _: None)
    gc.collect()
    gc.disable()
    try:
        world.produce(task, source(), producing(batch=10, concurrency=2))
    finally:
        gc.enable()
    assert peak <= 2 * 10 + 2 * 2


@pytest.mark.req("PE-18")
def test_the_engine_keeps_nothing_of_a_finished_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # A captured log record holds the traceback of its error, and with it the frames.
    monkeypatch.setattr(logging.getLogger("onceward.engine"), "disabled", True)
    base = Counted.alive

    def produce(transaction: Transaction) -> None:
        if transaction.id.endswith("1"):
            raise business()
        if transaction.id.endswith("2"):
            raise ValueError

    task = world.producer(exception=lambda *_: None)
    type(task).produce_transaction = world.handler(produce)
    type(task).handle_produce_exception = world.handler(lambda *_: None)
    given = (Transaction(id=f"t{number}", payload=Counted()) for number in range(100))
    assert world.produce(task, given, producing(concurrency=3)).failed == 20
    gc.collect()
    assert Counted.alive - base == 0


def test_a_finished_call_leaves_no_thread_behind(world: World) -> None:
    before = set(threading.enumerate())
    policy = producing(batch=50, concurrency=8, transaction_timeout=LONG, produce=retry(2, timeout=LONG))
    world.produce(world.producer(), transactions(50), policy)
    assert set(threading.enumerate()) <= before


# ── slots come back ─────────────────────────────────────────────────────────────────────────────────────

PATHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "success": (lambda _: None, {}),
    "business": (results(business()), {}),
    "error": (results(ValueError()), {}),
    "exhausted": (results(ValueError()), {"produce": retry(3, backoff=0.001)}),
    "attempt timeout": (lambda _: FOREVER, {"produce": retry(1, timeout=0.7)}),
    "lifecycle timeout": (lambda _: FOREVER, {"transaction_timeout": 0.7}),
    "cancelled by itself": (results(asyncio.CancelledError()), {}),
}


@pytest.mark.req("PE-20")
@pytest.mark.parametrize(("path", "policy"), PATHS.values(), ids=PATHS.keys())
def test_every_slot_is_free_again_after(world: World, path: Any, policy: dict[str, Any]) -> None:
    """Three transactions take the path, then three more can only succeed with all three slots at once."""
    met: list[str] = []

    def produce(transaction: Transaction) -> Any:
        if transaction.payload < 3:
            return path(transaction)
        met.append(transaction.id)
        return Until(lambda: len(met) == 3, "met")

    got: list[Any] = []
    task = world.producer(produce, success=lambda _, result: got.append(result))
    report = world.produce(task, transactions(6), producing(batch=6, concurrency=3, **policy))
    assert report.processed == 6
    assert got.count("met") == 3


@pytest.mark.req("PE-20")
def test_an_exit_in_user_code_gives_back_slot_and_id(world: World) -> None:
    task = world.producer(results(SystemExit(1), None))
    with pytest.raises(SystemExit):
        world.produce(task, transactions(1))
    assert world.produce(task, transactions(1)).succeeded == 1


@pytest.mark.req("PE-20")
def test_a_loop_timeout_gives_back_slots_and_ids(world: World) -> None:
    task = world.producer(results(FOREVER, FOREVER, None))
    with pytest.raises(ProducerLoopTimeoutException):
        world.produce(task, transactions(2), producing(concurrency=2, timeout=2 * SHORT))
    assert world.produce(task, transactions(2), producing(concurrency=2, timeout=LONG)).succeeded == 2


@pytest.mark.req("PE-20")
def test_cancelling_the_call_ends_its_work_and_gives_back_slots_and_ids() -> None:
    world = World("asyncio")
    task = world.producer(results(FOREVER, FOREVER, None))

    async def cancelled() -> Any:
        call = asyncio.create_task(task.produce_transactions(transactions(5), producing(concurrency=2)))
        await until_async(lambda: len(world.calls) >= 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        running = len(asyncio.all_tasks())
        return running, await task.produce_transactions(transactions(5), producing(timeout=LONG))

    running, report = world.run(cancelled)
    assert running == 1
    assert report.succeeded == 5
    assert len(world.calls) == 2 + 5


@pytest.mark.req("PE-20")
def test_a_cancelled_call_does_not_keep_an_id_it_waited_for() -> None:
    world = World("asyncio")
    go: list[bool] = []

    def produce(transaction: Transaction) -> Any:
        return Until(lambda: go, limit=LONG) if transaction.payload == "first" else None

    task = world.producer(produce)

    async def three() -> Any:
        def call(name: str) -> asyncio.Task[Any]:
            return asyncio.create_task(task.produce_transactions([Transaction(id="same", payload=name)]))

        async def stand_in_line() -> None:
            for _ in range(50):
                await asyncio.sleep(0)

        first = call("first")
        await until_async(lambda: world.calls)
        second = call("second")
        await stand_in_line()
        third = call("third")
        await stand_in_line()
        second.cancel()
        await asyncio.wait([second])
        go.append(True)
        await first
        return await asyncio.wait_for(third, LONG / 2)

    assert world.run(three).succeeded == 1


@pytest.mark.req("PE-20")
def test_a_keyboard_interrupt_lets_work_in_flight_finish_and_gives_back_slots_and_ids() -> None:
    world = World("threads")
    interrupted: list[bool] = []

    def produce(transaction: Transaction) -> Any:
        if interrupted:
            return None
        interrupted.append(True)
        # By then the caller's thread waits for its call to end.
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        return After(1.0)

    task = world.producer(produce, success=lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        world.produce(task, transactions(5))
    assert world.calls == [("produce", "t0"), ("success", "t0")]
    assert world.produce(task, transactions(5)).succeeded == 5


INTERRUPTED_AT_ITS_BEGINNING = """
import signal, time
from onceward import ProducerTask, Transaction

calls = []

class Orders(ProducerTask):
    def produce_transaction(self, transaction):
        calls.append(transaction.id)
        if len(calls) == 1:
            # The caller may not even have come to wait for the end of its call.
            signal.raise_signal(signal.SIGINT)
            time.sleep(1.0)

    def handle_produce_success(self, transaction, result):
        calls.append("success")

try:
    Orders(connectors={}).produce_transactions([Transaction(id="t0"), Transaction(id="t1")])
except KeyboardInterrupt:
    at_the_end = list(calls)
    time.sleep(1.0)
    print(at_the_end, calls == at_the_end)
"""


@pytest.mark.req("PE-20")
def test_a_keyboard_interrupt_at_the_beginning_of_a_call_leaves_nothing_running_behind_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_ITS_BEGINNING],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=True,
    )
    assert ended.stdout == "['t0', 'success'] True\n"


INTERRUPTED_AT_ITS_END = """
import signal
from onceward import ProducerTask, Transaction

class Orders(ProducerTask):
    def produce_transaction(self, transaction):
        # Raised in this thread, the signal does not wake the caller: it is seen with the end of the call.
        signal.raise_signal(signal.SIGINT)

try:
    Orders(connectors={}).produce_transactions([Transaction()])
except KeyboardInterrupt:
    pass
print("ended")
"""


@pytest.mark.req("PE-20")
def test_a_keyboard_interrupt_that_arrives_with_the_end_of_a_call_does_not_hang_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_ITS_END],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=True,
    )
    assert ended.stdout == "ended\n"


STUCK_AT_THE_END = """
import asyncio, threading
from onceward import AsyncProducerTask, Transaction
from onceward.task.mixins.policies import *
from onceward.task.settings import EngineSettings

released = threading.Event()

class Orders(AsyncProducerTask):
    settings = EngineSettings(stuck_grace=0.1)

    async def produce_transaction(self, transaction):
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                threading.Timer(1.0, released.set).start()

policy = ProducerPolicy(steps=ProducerSteps(produce=ProducePolicy(retry=RetryPolicy(timeout=0.1))))
report = asyncio.run(Orders(connectors={}).produce_transactions([Transaction()], policy))
print(report.stuck)
"""


@pytest.mark.req("PE-20")
def test_a_stuck_attempt_does_not_keep_the_event_loop_from_ending_once_it_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK_AT_THE_END], capture_output=True, text=True, timeout=LONG, check=True
    )
    assert ended.stdout == "1\n"


@pytest.mark.req("PE-20")
def test_the_slot_of_a_stuck_attempt_is_taken_over_and_the_others_go_on(world: World) -> None:
    released = threading.Event()

    def stuck(transaction: Transaction) -> Any:
        if transaction.payload == 0:
            released.wait(LONG)

    async def stuck_async(_: Any, transaction: Transaction) -> Any:
        while transaction.payload == 0 and not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    task = world.producer(stuck, settings=EngineSettings(stuck_grace=0.1))
    if world.asynchronous:
        type(task).produce_transaction = stuck_async
    seen: list[str] = []
    type(task).handle_produce_exception = world.handler(lambda t, exc: seen.append(exc.category))
    type(task).handle_produce_success = world.handler(lambda t, _: released.set() if t.payload == 4 else None)
    policy = producing(produce=retry(3, timeout=SHORT), concurrency=1)
    report = world.produce(task, transactions(5), policy)
    assert (report.succeeded, report.failed_by_category[TIMEOUT], report.stuck) == (4, 1, 1)
    assert seen == [TIMEOUT]


# ── one instance, many callers ──────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-21")
def test_one_instance_serves_several_calls_at_once(world: World) -> None:
    gauge = Gauge()
    task = world.producer(
        gauge.around(lambda _: Until(lambda: len(gauge.started) >= 4 or len(gauge.ended) > 0)),
        success=lambda *_: None,
    )
    given = [[Transaction(id=f"{call}-{number}", payload=call) for number in range(50)] for call in range(4)]
    reports = world.run_together(*((task.produce_transactions, each, producing(batch=7)) for each in given))
    assert [report.succeeded for report in reports] == [50] * 4
    assert gauge.peak == 4
    assert Counter(world.calls) == {
        (step, transaction.id): 1 for each in given for transaction in each for step in ("produce", "success")
    }


@pytest.mark.req("PE-21")
def test_calls_at_once_obey_each_its_own_policy(world: World) -> None:
    task = world.producer(results(system()))
    calls = [
        (task.produce_transactions, transactions(3, start=10 * attempts), producing(produce=retry(attempts)))
        for attempts in (1, 2, 3)
    ]
    assert [report.retries for report in world.run_together(*calls)] == [0, 3, 6]


@pytest.mark.req("PE-21")
def test_a_call_that_fails_does_not_touch_another(world: World) -> None:
    task = world.producer(lambda transaction: FOREVER if transaction.payload == 0 else After(0.01))
    failed, fine = world.run_together(
        (task.produce_transactions, transactions(1), producing(timeout=0.1)),
        (task.produce_transactions, transactions(30, start=1), producing(timeout=LONG)),
    )
    assert isinstance(failed, ProducerLoopTimeoutException)
    assert fine.succeeded == 30


@pytest.mark.req("PE-21")
def test_stop_ends_every_call_that_runs(world: World) -> None:
    gauge = Gauge()
    task = world.producer(gauge.around())

    def endless(call: int) -> Iterator[Transaction]:
        while True:
            yield Transaction(payload=call)

    def stop_when_all_run() -> None:
        until(lambda: len(set(gauge.started)) >= 3)
        task.stop()

    stopper = threading.Thread(target=stop_when_all_run)
    stopper.start()
    reports = world.run_together(*((task.produce_transactions, endless(call)) for call in range(3)))
    stopper.join()
    assert [report.stop_reason for report in reports] == [StopReason.STOPPED] * 3


@pytest.mark.req("PE-21")
def test_a_task_gains_no_attribute_from_the_transactions_it_serves(world: World) -> None:
    task = world.producer(success=lambda *_: None)
    world.produce(task, transactions(1))
    before = {name: repr(value) for name, value in vars(task).items() if name != "_engine_state"}
    world.produce(task, transactions(20), producing(concurrency=4))
    assert {name: repr(value) for name, value in vars(task).items() if name != "_engine_state"} == before


@pytest.mark.req("PE-21")
def test_an_asynchronous_instance_serves_event_loops_of_several_threads() -> None:
    world = World("asyncio")
    gauge = Gauge()
    task = world.producer(gauge.around(lambda _: After(0.001)))
    reports: list[Report] = []

    def call(number: int) -> None:
        given = [*transactions(20, start=20 * number), *same_id(5)]
        reports.append(world.produce(task, given, producing(batch=5, concurrency=3)))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
    assert [report.succeeded for report in reports] == [25] * 4


@pytest.mark.req("PE-21")
def test_a_producer_may_produce_inside_its_own_lifecycle(world: World) -> None:
    inner = world.producer(lambda transaction: transaction.payload)
    made = inner.produce_transactions

    if world.asynchronous:

        async def nested(_: Any, transaction: Transaction) -> Any:
            return (await made([transaction.derive()])).succeeded
    else:

        def nested(_: Any, transaction: Transaction) -> Any:
            return made([transaction.derive()]).succeeded

    outer = world.producer()
    type(outer).produce_transaction = nested
    got: list[int] = []
    type(outer).handle_produce_success = world.handler(lambda _, result: got.append(result))
    world.produce(outer, transactions(4), producing(concurrency=2))
    assert got == [1, 1, 1, 1]
