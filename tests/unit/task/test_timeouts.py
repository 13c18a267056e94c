"""Three time limits, each on its own; and what happens to an attempt that does not end."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from onceward import Transaction
from onceward.task.exceptions import (
    AttemptInterrupted,
    ConsumerLoopTimeoutException,
    ExceptionCategory,
    FetchTimeoutException,
)
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.task.mixins.utils import cancel_requested
from onceward.task.ports_threads import BlockingPorts
from onceward.task.settings import EngineSettings
from onceward.task.work import Outcome, OutcomeStatus
from tests.support.wait import until
from tests.support.world import (
    SHORT,
    After,
    Deaf,
    ListSource,
    Until,
    World,
    business,
    consuming,
    results,
    retry,
    transactions,
    within,
)

pytestmark = pytest.mark.timeout(60)

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory
FOREVER = Until(lambda: False)
ONE = Transaction(id="t0", payload="p")


def outcome(world: World, task: Any, policy: ConsumerPolicy) -> Outcome:
    ended = world.run(task.start_processing, ONE, policy)
    assert isinstance(ended, Outcome)
    return ended


class Spans:
    """When attempts began and ended, recorded from inside."""

    def __init__(self) -> None:
        self.all: list[list[float]] = []

    def __enter__(self) -> None:
        self.all.append([time.monotonic(), float("inf")])

    def __exit__(self, *_: object) -> None:
        self.all[-1][1] = time.monotonic()


def deaf_for(world: World, seconds: float, spans: Spans) -> Any:
    """A method that takes its time after it was asked to stop."""

    def method(task: Any, *_: Any) -> None:
        with spans:
            until(cancel_requested)
            time.sleep(seconds)

    async def method_async(task: Any, *_: Any) -> None:
        end = inf
        with spans:
            while time.monotonic() < end:
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    end = min(end, time.monotonic() + seconds)

    return method_async if world.asynchronous else method


# ── the step ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-20", "CE-05")
def test_an_attempt_of_process_that_times_out_is_tried_again(world: World) -> None:
    task = world.consumer(results(FOREVER, FOREVER, "done"), success=results(None), exception=results(None))
    ended = outcome(world, task, consuming(process=retry(3, timeout=SHORT)))
    assert ended.result == "done"
    assert world.steps_of("t0") == ["process"] * 3 + ["success"]


@pytest.mark.req("CE-20")
def test_a_step_that_only_times_out_fails_as_timeout(world: World) -> None:
    task = world.consumer(results(FOREVER), exception=results(None), source=ListSource([ONE]))
    report = world.consume(task, consuming(process=retry(2, timeout=SHORT)))
    assert world.steps_of("t0") == ["process", "process", "exception"]
    assert world.errors[0][1].category is TIMEOUT
    assert report.failed_by_category == {BUSINESS: 0, SYSTEM: 0, TIMEOUT: 1}
    assert (report.timed_out, report.stuck, report.retries) == (2, 0, 1)


@pytest.mark.req("CE-20", "CE-07")
def test_an_attempt_of_the_success_handler_that_times_out_is_tried_again(world: World) -> None:
    task = world.consumer(results("r"), success=results(FOREVER, None), exception=results(None))
    ended = outcome(world, task, consuming(success=retry(2, timeout=SHORT)))
    assert ended.status is OutcomeStatus.SUCCEEDED
    assert world.steps_of("t0") == ["process", "success", "success"]


@pytest.mark.req("CE-20", "CE-08")
def test_an_exception_handler_that_only_times_out_is_a_timeout_in_the_end(world: World) -> None:
    task = world.consumer(results(business()), exception=results(FOREVER))
    ended = outcome(world, task, consuming(exception=retry(2, timeout=0.05)))
    assert ended.error is not None
    assert (ended.error.category, ended.step, ended.attempt) == (TIMEOUT, "exception", 1)


@pytest.mark.req("CE-20")
def test_a_step_timeout_is_for_each_attempt_and_each_step_not_for_their_sum(world: World) -> None:
    slow = After(0.25, OSError())
    task = world.consumer(
        results(slow, slow, After(0.25, "r")),
        success=results(slow, slow, slow),
        exception=results(slow, slow, After(0.25)),
        source=ListSource([ONE]),
    )
    limit = retry(3, timeout=0.7)
    report = world.consume(task, consuming(process=limit, success=limit, exception=limit))
    assert report.timed_out == 0
    assert world.steps_of("t0") == ["process"] * 3 + ["success"] * 3 + ["exception"] * 3


@pytest.mark.req("CE-20")
def test_backoff_does_not_count_as_time_of_an_attempt(world: World) -> None:
    task = world.consumer(results(OSError(), "r"))
    ended = outcome(world, task, consuming(process=retry(2, timeout=SHORT, backoff=SHORT + 0.1)))
    assert ended.status is OutcomeStatus.SUCCEEDED


@pytest.mark.req("CE-20")
def test_a_timeout_too_short_for_anything_hangs_nothing(world: World) -> None:
    task = world.consumer(results("r"), source=ListSource(transactions(30)))
    report = within(20, world.consume, task, consuming(process=retry(2, timeout=1e-9), concurrency=2))
    assert report.processed == 30


@pytest.mark.req("CE-20")
def test_a_handler_may_use_timeouts_of_its_own(world: World) -> None:
    async def process(task: Any, given: Transaction) -> str:
        for _ in range(3):
            try:
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(30)
            except TimeoutError:
                continue
        return "done"

    def plain(task: Any, given: Transaction) -> str:
        if threading.Event().wait(0.01):
            raise AssertionError
        return "done"

    task = world.consumer()
    type(task).process_transaction = process if world.asynchronous else plain
    assert outcome(world, task, consuming(process=retry(1, timeout=10))).result == "done"


# ── the lifecycle ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-19")
def test_a_lifecycle_that_takes_too_long_in_one_attempt_fails_as_timeout(world: World) -> None:
    task = world.consumer(results(FOREVER), success=results(None), exception=results(None))
    ended = outcome(world, task, consuming(process=retry(5), transaction_timeout=SHORT))
    assert world.steps_of("t0") == ["process", "exception"]
    assert ended.error is not None
    assert ended.error.category is TIMEOUT


@pytest.mark.req("CE-19")
def test_attempts_and_steps_add_up_in_a_lifecycle(world: World) -> None:
    task = world.consumer(
        results(After(0.2, OSError()), After(0.2, "r")), success=results(FOREVER), exception=results(None)
    )
    ended = outcome(world, task, consuming(process=retry(2), transaction_timeout=1.2))
    assert world.steps_of("t0") == ["process", "process", "success", "exception"]
    assert ended.error is not None
    assert ended.error.category is TIMEOUT


@pytest.mark.req("CE-19")
def test_backoff_counts_as_time_of_the_lifecycle(world: World) -> None:
    task = world.consumer(results(OSError("x")), exception=results(None))
    began = time.monotonic()
    ended = outcome(world, task, consuming(process=retry(9, backoff=30), transaction_timeout=SHORT))
    assert time.monotonic() - began < 15
    assert world.steps_of("t0") == ["process", "exception"]
    assert ended.error is not None
    assert ended.error.category is TIMEOUT


@pytest.mark.req("CE-19")
def test_waiting_for_a_slot_is_not_time_of_the_lifecycle(world: World) -> None:
    task = world.consumer(lambda _: After(0.2), source=ListSource(transactions(5)))
    report = world.consume(task, consuming(concurrency=1, transaction_timeout=0.7))
    assert report.succeeded == 5


@pytest.mark.req("CE-19")
def test_the_loop_goes_on_after_a_lifecycle_timeout(world: World) -> None:
    task = world.consumer(
        lambda each: FOREVER if each.id == "t0" else "r", source=ListSource(transactions(3))
    )
    report = world.consume(task, consuming(transaction_timeout=SHORT))
    assert (report.succeeded, report.failed_by_category[TIMEOUT], report.timed_out) == (2, 1, 1)


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-21")
def test_a_loop_timeout_interrupts_what_runs_and_starts_nothing_more(world: World) -> None:
    task = world.consumer(
        lambda _: FOREVER, success=results(None), exception=results(None), source=ListSource(transactions(6))
    )
    with pytest.raises(ConsumerLoopTimeoutException) as raised:
        world.consume(task, consuming(timeout=2 * SHORT, concurrency=2))
    assert isinstance(raised.value, TimeoutError)
    assert sorted(world.calls) == [("process", "t0"), ("process", "t1")]
    assert raised.value.report is not None
    assert (raised.value.report.abandoned, raised.value.report.unstarted) == (2, 4)


@pytest.mark.req("CE-21")
def test_a_loop_timeout_ends_a_fetch(world: World) -> None:
    source = ListSource(script=[FOREVER])
    with pytest.raises(ConsumerLoopTimeoutException):
        within(20, world.consume, world.consumer(source=source), consuming(timeout=0.1))


@pytest.mark.req("CE-21")
def test_a_loop_timeout_ends_a_backoff(world: World) -> None:
    task = world.consumer(results(OSError()), exception=results(None), source=ListSource(transactions(1)))
    with pytest.raises(ConsumerLoopTimeoutException):
        within(20, world.consume, task, consuming(timeout=2 * SHORT, process=retry(2, backoff=60)))
    assert world.steps_of("t0") == ["process"]


@pytest.mark.req("CE-21")
def test_a_loop_timeout_ends_waiting_for_an_empty_source(world: World) -> None:
    with pytest.raises(ConsumerLoopTimeoutException) as raised:
        within(20, world.consume, world.consumer(), consuming(timeout=0.2, streaming=True))
    assert raised.value.report is not None
    assert raised.value.report.duration >= 0.2


@pytest.mark.req("CE-21")
def test_a_loop_timeout_does_not_wait_for_an_attempt_that_does_not_end(world: World) -> None:
    never = threading.Event()
    stuck = Deaf(never)
    task = world.consumer(lambda _: stuck, source=ListSource(transactions(1)))
    with pytest.raises(ConsumerLoopTimeoutException):
        world.consume_then(task, consuming(timeout=0.2), never.set)
    assert not stuck.gave_up


@pytest.mark.req("CE-21")
def test_a_loop_timeout_does_not_wait_for_a_fetch_that_does_not_end(world: World) -> None:
    never = threading.Event()
    stuck = Deaf(never)
    task = world.consumer(source=ListSource(script=[stuck]))
    with pytest.raises(ConsumerLoopTimeoutException):
        world.consume_then(task, consuming(timeout=0.2), never.set)
    assert not stuck.gave_up


# ── independence ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-22")
def test_a_step_limit_fires_inside_a_wider_lifecycle_and_loop_limit(world: World) -> None:
    task = world.consumer(results(FOREVER, FOREVER, "r"), source=ListSource([ONE]))
    report = world.consume(
        task, consuming(process=retry(3, timeout=SHORT), transaction_timeout=30, timeout=60)
    )
    assert (report.succeeded, report.timed_out, report.retries) == (1, 2, 2)


@pytest.mark.req("CE-22")
def test_a_lifecycle_limit_fires_inside_a_wider_step_and_loop_limit(world: World) -> None:
    task = world.consumer(results(FOREVER), exception=results(None), source=ListSource([ONE]))
    report = world.consume(
        task, consuming(process=retry(9, timeout=30), transaction_timeout=SHORT, timeout=60)
    )
    assert world.steps_of("t0") == ["process", "exception"]
    assert (report.failed_by_category[TIMEOUT], report.timed_out) == (1, 1)


@pytest.mark.req("CE-22")
def test_a_loop_limit_fires_inside_a_wider_step_and_lifecycle_limit(world: World) -> None:
    task = world.consumer(results(FOREVER), exception=results(None), source=ListSource([ONE]))
    with pytest.raises(ConsumerLoopTimeoutException):
        world.consume(
            task, consuming(process=retry(9, timeout=30), transaction_timeout=30, timeout=2 * SHORT)
        )
    assert world.steps_of("t0") == ["process"]


@pytest.mark.req("CE-22")
def test_step_limits_fire_until_the_lifecycle_limit_does(world: World) -> None:
    task = world.consumer(results(FOREVER), exception=results(None), source=ListSource([ONE]))
    report = world.consume(task, consuming(process=retry(1000, timeout=0.1), transaction_timeout=1.0))
    assert 2 <= world.steps_of("t0").count("process") <= 10
    assert world.steps_of("t0")[-1] == "exception"
    assert report.failed_by_category[TIMEOUT] == 1


@pytest.mark.req("CE-22")
def test_step_limits_fire_until_the_loop_limit_does(world: World) -> None:
    task = world.consumer(results(FOREVER), exception=results(None), source=ListSource([ONE]))
    with pytest.raises(ConsumerLoopTimeoutException):
        world.consume(task, consuming(process=retry(1000, timeout=0.1), timeout=1.0))
    assert 2 <= len(world.calls) <= 10
    assert {step for step, _ in world.calls} == {"process"}


@pytest.mark.req("CE-22")
def test_lifecycle_limits_fire_until_the_loop_limit_does(world: World) -> None:
    task = world.consumer(results(FOREVER), source=ListSource(transactions(1000)))
    with pytest.raises(ConsumerLoopTimeoutException) as raised:
        world.consume(task, consuming(transaction_timeout=0.1, timeout=1.0))
    assert raised.value.report is not None
    assert 2 <= raised.value.report.failed_by_category[TIMEOUT] <= 10


@pytest.mark.req("CE-22")
def test_a_fetch_limit_knows_nothing_of_the_lifecycles(world: World) -> None:
    source = ListSource(script=[After(0.2, [ONE]), FOREVER])
    task = world.consumer(results(After(0.2, "r")), source=source)
    with pytest.raises(FetchTimeoutException) as raised:
        world.consume(task, consuming(fetch=retry(1, timeout=0.7), transaction_timeout=0.7))
    assert raised.value.report is not None
    assert raised.value.report.succeeded == 1


# ── attempts that do not end ────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-20")
def test_a_timed_out_attempt_never_overlaps_its_retry(world: World) -> None:
    spans = Spans()
    task = world.consumer()
    type(task).process_transaction = deaf_for(world, 0.2, spans)
    ended = outcome(world, task, consuming(process=retry(3, timeout=SHORT)))
    assert ended.status is OutcomeStatus.FAILED
    assert len(spans.all) == 3
    assert all(before[1] <= after[0] for before, after in pairwise(spans.all))


@pytest.mark.req("CE-20")
def test_a_timed_out_attempt_never_overlaps_the_exception_handler(world: World) -> None:
    spans = Spans()
    began: list[float] = []
    task = world.consumer(exception=lambda *_: began.append(time.monotonic()))
    type(task).process_transaction = deaf_for(world, 0.2, spans)
    outcome(world, task, consuming(transaction_timeout=SHORT))
    assert spans.all[0][1] <= began[0]


@pytest.mark.req("CE-20")
def test_the_late_result_of_a_timed_out_attempt_is_discarded(world: World) -> None:
    late = threading.Event()
    got: list[Any] = []
    task = world.consumer(
        results(Deaf(late, "late", limit=2 * SHORT), "in time"), success=lambda _, result: got.append(result)
    )
    ended = outcome(world, task, consuming(process=retry(2, timeout=SHORT)))
    assert got == ["in time"]
    assert ended.result == "in time"


@pytest.mark.req("CE-20")
def test_a_stuck_attempt_forfeits_the_others_and_fails_as_timeout(world: World) -> None:
    never = threading.Event()
    task = world.consumer(
        lambda _: Deaf(never, "late"),
        success=results(None),
        exception=results(None),
        source=ListSource([ONE]),
        settings=EngineSettings(stuck_grace=0.1),
    )
    report = world.consume_then(task, consuming(process=retry(5, timeout=SHORT)), never.set)
    assert world.steps_of("t0") == ["process", "exception"]
    assert world.errors[0][1].category is TIMEOUT
    assert "stuck" in str(world.errors[0][1])
    assert (report.failed, report.stuck, report.timed_out) == (1, 1, 1)


@pytest.mark.req("CE-20")
@pytest.mark.parametrize("step", ["success", "exception"])
def test_a_stuck_handler_is_given_up_on_as_well(world: World, step: str) -> None:
    never = threading.Event()
    handlers: dict[str, Callable[..., Any]] = {"success": results(None), "exception": results(None)}
    handlers[step] = lambda *_: Deaf(never)
    task = world.consumer(
        results(business() if step == "exception" else "r"),
        **handlers,
        source=ListSource([ONE]),
        settings=EngineSettings(stuck_grace=0.1),
    )
    limit = retry(3, timeout=SHORT)
    report = world.consume_then(task, consuming(success=limit, exception=limit), never.set)
    path = {"success": ["process", "success", "exception"], "exception": ["process", "exception"]}
    assert world.steps_of("t0") == path[step]
    assert (report.failed_by_category[TIMEOUT], report.stuck) == (1, 1)


@pytest.mark.req("CE-20", "CE-18")
def test_a_stuck_attempt_does_not_cost_the_others_a_slot(world: World) -> None:
    never = threading.Event()
    task = world.consumer(
        lambda each: Deaf(never) if each.id == "t0" else "r",
        source=ListSource(transactions(5)),
        settings=EngineSettings(stuck_grace=0.05),
    )
    report = world.consume_then(task, consuming(concurrency=1, process=retry(1, timeout=SHORT)), never.set)
    assert (report.succeeded, report.failed, report.stuck) == (4, 1, 1)


@pytest.mark.req("CE-20")
def test_what_a_stuck_attempt_returns_in_the_end_is_discarded(world: World) -> None:
    late = threading.Event()

    def process(each: Transaction) -> Any:
        if each.id == "t0":
            return Deaf(late, "late")
        late.set()
        return After(0.1, "r")

    task = world.consumer(
        process,
        success=results(None),
        exception=results(None),
        source=ListSource(transactions(2)),
        settings=EngineSettings(stuck_grace=0.05),
    )
    report = world.consume(task, consuming(process=retry(1, timeout=SHORT)))
    assert world.steps_of("t0") == ["process", "exception"]
    assert (report.succeeded, report.failed, report.stuck) == (1, 1, 1)


RAISE = EngineSettings(interrupt="raise")


@pytest.mark.req("CE-20")
def test_a_pure_python_loop_is_interrupted_in_its_thread_by_request() -> None:
    world = World("threads")
    seen: list[type[BaseException]] = []

    def process(task: Any, given: Transaction) -> None:
        try:
            while True:
                pass
        except BaseException as error:
            seen.append(type(error))
            raise

    task = world.consumer(settings=RAISE)
    type(task).process_transaction = process
    ended = outcome(world, task, consuming(process=retry(2, timeout=SHORT)))
    assert seen == [AttemptInterrupted] * 2
    assert ended.error is not None
    assert ended.error.category is TIMEOUT


@pytest.mark.req("CE-20")
def test_a_catch_all_in_a_handler_does_not_swallow_the_interrupt() -> None:
    world = World("threads")

    def process(task: Any, given: Transaction) -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    task = world.consumer(settings=RAISE)
    type(task).process_transaction = process
    ended = outcome(world, task, consuming(process=retry(1, timeout=0.05)))
    assert ended.error is not None
    assert ended.error.category is TIMEOUT


@pytest.mark.req("CE-20")
# An exception that is raised in a thread may hit a callback of the garbage collector, where Python ignores it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("settings", [EngineSettings(), RAISE], ids=["cancel", "raise"])
def test_interrupts_that_come_late_hit_nobody_else(settings: EngineSettings) -> None:
    """Attempts that last about as long as their limit, with every kind of ending."""
    # The limits depend on the machine: on a slow one, the shortest would cut off everything.
    assert any(both_ways_occur_and_each_has_one_end(limit, settings) for limit in (0.003, 0.01, 0.03))


def test_the_watchdog_is_started_where_no_interrupt_can_break_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two watchdogs, of which one is forgotten, would leave the call waiting for the other."""
    interruptible: list[bool] = []
    start = BlockingPorts._start_watchdog

    def note(ports: BlockingPorts) -> None:
        interruptible.append(threading.get_ident() in ports._tries)
        start(ports)

    monkeypatch.setattr(BlockingPorts, "_start_watchdog", note)
    world = World("threads")
    task = world.consumer(lambda _: "r", source=ListSource(transactions(1)), settings=RAISE)
    world.consume(task, consuming(process=retry(1, timeout=60)))
    assert interruptible == [False]


def both_ways_occur_and_each_has_one_end(limit: float, settings: EngineSettings) -> bool:
    world = World("threads")
    dice = random.Random(7)

    def process(each: Transaction) -> str:
        end = time.perf_counter() + limit * dice.uniform(0.5, 1.5)
        if each.payload % 3 == 0:
            time.sleep(max(end - time.perf_counter(), 0))
        while time.perf_counter() < end:
            pass
        if each.payload % 5 == 0:
            raise OSError
        return "r"

    def handler(*_: Any) -> None:
        # Python code, where a late interrupt would land.
        for _ in range(2000):
            pass

    task = world.consumer(
        process, success=handler, exception=handler, source=ListSource(transactions(400)), settings=settings
    )
    report = world.consume(
        task, consuming(concurrency=4, batch=100, process=retry(2, timeout=limit), mode="continuous")
    )
    assert report.processed == 400
    for number in range(400):
        steps = world.steps_of(f"t{number}") if number % 50 == 0 else []
        assert steps.count("success") + steps.count("exception") == (1 if steps else 0)
    assert sum(step in ("success", "exception") for step, _ in world.calls) == 400
    return report.timed_out > 25 and report.succeeded > 25


@pytest.mark.req("CE-20")
def test_attempts_that_end_just_when_they_are_given_up_on_have_one_outcome_each(world: World) -> None:
    dice = random.Random(11)

    def method(task: Any, each: Transaction) -> None:
        world.calls.append(("process", each.id))
        time.sleep(0.004 * dice.uniform(0.5, 1.5))

    async def method_async(task: Any, each: Transaction) -> None:
        world.calls.append(("process", each.id))
        end = time.monotonic() + 0.004 * dice.uniform(0.5, 1.5)
        while time.monotonic() < end:
            try:
                await asyncio.sleep(0.0005)
            except asyncio.CancelledError:
                continue

    task = world.consumer(
        success=results(None),
        exception=results(None),
        source=ListSource(transactions(400)),
        settings=EngineSettings(stuck_grace=0.002),
    )
    type(task).process_transaction = method_async if world.asynchronous else method
    report = within(
        40, world.consume, task, consuming(concurrency=4, batch=50, process=retry(2, timeout=0.002))
    )
    assert report.processed == 400
    assert sum(step in ("success", "exception") for step, _ in world.calls) == 400


@pytest.mark.req("CE-20")
def test_a_handler_that_swallows_its_cancellation_still_timed_out() -> None:
    world = World("asyncio")

    async def process(task: Any, given: Transaction) -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
        return "as if nothing had happened"

    task = world.consumer(success=results(None), exception=results(None))
    type(task).process_transaction = process
    ended = outcome(world, task, consuming(process=retry(2, timeout=0.05)))
    assert ended.error is not None
    assert ended.error.category is TIMEOUT
    assert world.steps_of("t0") == ["exception"]


@pytest.mark.req("CE-20")
def test_a_timed_out_attempt_leaves_no_cancellation_behind() -> None:
    world = World("asyncio")
    seen: list[int] = []

    async def exception(task: Any, given: Transaction, error: Exception) -> None:
        current = asyncio.current_task()
        assert current is not None
        seen.append(current.cancelling())
        await asyncio.sleep(0.01)

    task = world.consumer(lambda _: FOREVER)
    type(task).handle_transaction_exception = exception
    outcome(world, task, consuming(process=retry(2, timeout=0.05)))
    assert seen == [0]


# ── the cancel token ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-20")
def test_code_that_polls_learns_that_its_attempt_has_timed_out(world: World) -> None:
    reported: list[bool] = []

    def method(task: Any, given: Transaction) -> None:
        try:
            reported.append(cancel_requested())
            until(cancel_requested)
        finally:
            reported.append(cancel_requested())

    async def method_async(task: Any, given: Transaction) -> None:
        try:
            reported.append(cancel_requested())
            await asyncio.sleep(30)
        finally:
            reported.append(cancel_requested())

    task = world.consumer()
    type(task).process_transaction = method_async if world.asynchronous else method
    outcome(world, task, consuming(process=retry(2, timeout=SHORT)))
    assert reported == [False, True, False, True]


@pytest.mark.req("CE-20")
def test_handlers_after_a_timeout_are_not_asked_to_stop(world: World) -> None:
    reported: list[bool] = []
    task = world.consumer(results(FOREVER), exception=lambda *_: reported.append(cancel_requested()))
    outcome(world, task, consuming(process=retry(1, timeout=0.05)))
    assert reported == [False]


@pytest.mark.req("CE-20")
@pytest.mark.parametrize("limit", [None, 10.0], ids=["unlimited", "limited"])
def test_handlers_after_a_stuck_attempt_are_not_asked_to_stop(world: World, limit: float | None) -> None:
    never = threading.Event()
    reported: list[bool] = []
    task = world.consumer(
        lambda _: Deaf(never),
        exception=lambda *_: reported.append(cancel_requested()),
        source=ListSource([ONE]),
        settings=EngineSettings(stuck_grace=0.05),
    )
    policy = consuming(process=retry(1, timeout=0.05), exception=retry(1, timeout=limit))
    world.consume_then(task, policy, never.set)
    assert reported == [False]


@pytest.mark.req("CE-20")
def test_a_stuck_attempt_that_looks_again_later_still_learns_that_it_shall_stop(world: World) -> None:
    handled, looked = threading.Event(), threading.Event()
    reported: list[bool] = []

    def method(task: Any, given: Transaction) -> None:
        handled.wait(5)
        reported.append(cancel_requested())
        looked.set()

    async def method_async(task: Any, given: Transaction) -> None:
        await Deaf(handled).wait_async()
        reported.append(cancel_requested())
        looked.set()

    def exception(*_: Any) -> Any:
        handled.set()
        return Until(looked.is_set)

    task = world.consumer(exception=exception, settings=EngineSettings(stuck_grace=0.05))
    type(task).process_transaction = method_async if world.asynchronous else method
    outcome(world, task, consuming(process=retry(1, timeout=SHORT), exception=retry(1, timeout=20)))
    assert reported == [True]
