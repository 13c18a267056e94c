"""When and why a consume call ends, and what its report says."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

from onceward import Transaction
from onceward.task.exceptions import (
    ConsumerLoopTimeoutException,
    ExceptionCategory,
    FetchException,
    LoopError,
)
from onceward.task.mixins.policies import EmptyQueuePolicy
from onceward.task.report import StopReason
from tests.support.wait import until
from tests.support.world import (
    SHORT,
    After,
    ListSource,
    Until,
    World,
    business,
    consuming,
    results,
    retry,
    system,
    transactions,
    within,
)

pytestmark = pytest.mark.timeout(60)

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory
FOREVER = Until(lambda: False)


# ── reasons ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-31", "CE-14")
def test_an_empty_source_ends_the_loop(world: World) -> None:
    assert world.consume(world.consumer()).stop_reason is StopReason.EMPTY


@pytest.mark.req("CE-31")
def test_the_limit_ends_the_loop_without_another_fetch(world: World) -> None:
    source = ListSource(transactions(9))
    report = world.consume(world.consumer(source=source), consuming(limit=4, batch=2))
    assert report.stop_reason is StopReason.LIMIT
    assert len(source.asked) == 2


@pytest.mark.req("CE-31", "CE-32")
def test_a_limit_of_zero_fetches_nothing(world: World) -> None:
    source = ListSource(transactions(9))
    report = world.consume(world.consumer(source=source), consuming(limit=0))
    assert report.stop_reason is StopReason.LIMIT
    assert source.asked == []


@pytest.mark.req("CE-31", "CE-21")
def test_the_report_of_a_loop_timeout_says_so(world: World) -> None:
    with pytest.raises(ConsumerLoopTimeoutException) as raised:
        world.consume(world.consumer(), consuming(streaming=True, timeout=0.05))
    assert raised.value.report is not None
    assert raised.value.report.stop_reason is StopReason.TIMEOUT


@pytest.mark.req("CE-31", "CE-13")
def test_the_report_of_a_fetch_error_says_so(world: World) -> None:
    source = ListSource(script=[transactions(2), OSError()])
    with pytest.raises(FetchException) as raised:
        world.consume(world.consumer(source=source))
    assert raised.value.report is not None
    assert raised.value.report.stop_reason is StopReason.FETCH_ERROR
    assert raised.value.report.succeeded == 2


@pytest.mark.req("CE-13")
def test_a_fetch_error_ends_a_streaming_loop_too(world: World) -> None:
    source = ListSource(script=[[], OSError(), transactions(1)])
    task = world.consumer(source=source)
    with pytest.raises(FetchException):
        world.consume(task, consuming(streaming=True, empty_queue=EmptyQueuePolicy(backoff=0.001)))
    assert len(source.asked) == 2


@pytest.mark.req("CE-13")
def test_a_task_can_consume_again_after_a_fetch_error(world: World) -> None:
    source = ListSource(script=[OSError(), transactions(1)])
    task = world.consumer(source=source)
    ends = world.consume_in_turn(task, consuming(), consuming())
    assert isinstance(ends[0], FetchException)
    assert ends[1].succeeded == 1


@pytest.mark.req("CE-32")
@pytest.mark.parametrize(("batch", "limit", "sizes"), [(4, 10, [4, 4, 2]), (10, 3, [3]), (3, 6, [3, 3])])
def test_no_more_is_fetched_than_the_limit_leaves(
    world: World, batch: int, limit: int, sizes: list[int]
) -> None:
    source = ListSource(transactions(50))
    world.consume(world.consumer(source=source), consuming(batch=batch, limit=limit))
    assert [size for size, _ in source.asked] == sizes


@pytest.mark.req("CE-32")
def test_short_batches_leave_room_for_the_next(world: World) -> None:
    source = ListSource(script=[transactions(1), transactions(2, 1), transactions(3, 3)])
    world.consume(world.consumer(source=source), consuming(batch=4, limit=6))
    assert [size for size, _ in source.asked] == [4, 4, 3]


# ── report ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-31")
def test_the_report_adds_up(world: World) -> None:
    ends: dict[str, Any] = {"t1": business(), "t2": system(), "t3": OSError(), "t4": FOREVER}
    task = world.consumer(lambda each: ends.get(each.id), source=ListSource(transactions(8)))
    report = world.consume(task, consuming(batch=3, process=retry(2, timeout=SHORT)))
    assert (report.processed, report.succeeded, report.failed) == (8, 4, 4)
    assert report.failed_by_category == {BUSINESS: 1, SYSTEM: 2, TIMEOUT: 1}
    assert (report.timed_out, report.stuck, report.abandoned, report.unstarted) == (2, 0, 0, 0)
    assert (report.retries, report.fetches, report.empty_fetches) == (3, 4, 1)
    assert 2 * SHORT <= report.duration < 30


@pytest.mark.req("CE-31")
def test_two_calls_have_reports_of_their_own(world: World) -> None:
    task = world.consumer(source=ListSource(script=[transactions(2), [], transactions(3)]))
    first, second = world.consume_in_turn(task, consuming(), consuming())
    assert (first.succeeded, second.succeeded) == (2, 3)


# ── stop ────────────────────────────────────────────────────────────────────────────────────────────────


def endless(world: World, **more: Any) -> tuple[Any, ListSource]:
    """A task whose source is never empty."""
    source = ListSource(transactions(100_000))
    return world.consumer(source=source, **more), source


@pytest.mark.req("CE-31")
def test_stop_from_another_thread_ends_the_loop(world: World) -> None:
    task, _ = endless(world, process=lambda _: After(0.001))
    timer = threading.Timer(0.1, task.stop)
    timer.start()
    report = within(20, world.consume, task, consuming(concurrency=2))
    timer.join()
    assert report.stop_reason is StopReason.STOPPED


@pytest.mark.req("CE-31")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_stop_from_a_handler_ends_the_loop_after_its_batch(world: World, mode: str) -> None:
    source = ListSource(transactions(100))
    task = world.consumer(lambda each: task.stop() if each.id == "t0" else None, source=source)
    report = within(20, world.consume, task, consuming(batch=5, mode=mode))
    assert report.stop_reason is StopReason.STOPPED
    # Transactions of a source that does not settle are finished, and no more are fetched.
    assert report.succeeded + len(source.items) == 100
    assert report.unstarted == 0
    assert report.succeeded <= 15


@pytest.mark.req("CE-31")
def test_stop_ends_the_wait_for_an_empty_source_at_once(world: World) -> None:
    source = ListSource()
    task = world.consumer(source=source)
    timer = threading.Timer(0.1, task.stop)
    source.on_fetch = timer.start
    policy = consuming(streaming=True, empty_queue=EmptyQueuePolicy(backoff=3600, backoff_cap=0))
    report = within(20, world.consume, task, policy)
    timer.join()
    assert report.stop_reason is StopReason.STOPPED
    assert report.empty_fetches == 1


@pytest.mark.req("CE-31")
def test_stop_ends_the_backoff_of_a_fetch_at_once(world: World) -> None:
    source = ListSource(script=[OSError()])
    task = world.consumer(source=source)
    timer = threading.Timer(0.1, task.stop)
    source.on_fetch = timer.start
    report = within(20, world.consume, task, consuming(fetch=retry(2, backoff=3600)))
    timer.join()
    assert report.stop_reason is StopReason.STOPPED


@pytest.mark.req("CE-31")
def test_stop_lets_work_in_flight_finish_with_its_retries(world: World) -> None:
    answers = results(OSError(), OSError(), "r")

    def process(_: Transaction) -> Any:
        task.stop()
        return answers()

    task = world.consumer(process, success=results(None), source=ListSource(transactions(1)))
    report = world.consume(task, consuming(process=retry(3, backoff=0.01)))
    assert (report.succeeded, report.stop_reason) == (1, StopReason.STOPPED)
    assert world.steps_of("t0") == ["process"] * 3 + ["success"]


@pytest.mark.req("CE-31")
def test_stop_before_the_call_ends_it_before_it_begins_and_only_that_one(world: World) -> None:
    source = ListSource(transactions(3))
    task = world.consumer(source=source)
    task.stop()
    first, second = world.consume_in_turn(task, consuming(), consuming())
    assert (first.stop_reason, first.processed, first.fetches) == (StopReason.STOPPED, 0, 0)
    assert (second.stop_reason, second.processed) == (StopReason.EMPTY, 3)


@pytest.mark.req("CE-31")
def test_stopping_twice_is_stopping_once(world: World) -> None:
    source = ListSource(transactions(3))
    task = world.consumer(source=source)
    task.stop()
    task.stop()
    first, second = world.consume_in_turn(task, consuming(), consuming())
    assert (first.stop_reason, second.stop_reason) == (StopReason.STOPPED, StopReason.EMPTY)


@pytest.mark.req("CE-31")
def test_stop_ends_all_calls_that_run(world: World) -> None:
    task, source = endless(world, process=lambda _: After(0.001))
    policies = [consuming(batch=3, extra={"call": number}) for number in range(3)]

    def stop_when_all_run() -> None:
        until(lambda: len({extra["call"] for _, extra in list(source.asked)}) >= 3)
        task.stop()

    stopper = threading.Thread(target=stop_when_all_run, daemon=True)
    stopper.start()
    reports = within(20, world.run_together, *((task.consume_transactions, policy) for policy in policies))
    stopper.join()
    assert [report.stop_reason for report in reports] == [StopReason.STOPPED] * 3


@pytest.mark.req("CE-31")
def test_a_source_that_is_always_empty_leaves_room_for_others_on_the_event_loop() -> None:
    source = ListSource()

    def on_fetch() -> None:
        if len(source.asked) > 50_000:
            raise OSError("nobody could stop it")

    source.on_fetch = on_fetch
    task = World("asyncio").consumer(source=source)

    async def main() -> Any:
        asyncio.get_running_loop().call_later(0.02, task.stop)
        policy = consuming(streaming=True, empty_queue=EmptyQueuePolicy(backoff=0))
        return await task.consume_transactions(policy)

    assert asyncio.run(main()).stop_reason is StopReason.STOPPED


PROCESS = """
import asyncio, signal, sys, time
from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.task.mixins.policies import ConsumerPolicy

POLICY = ConsumerPolicy.model_validate({"loop": {"streaming": True, "batch": {"size": 2}}})

class Source:
    asked = 0
    def fetch_transactions(self, size):
        self.asked += 1
        return [Transaction(id="t0"), Transaction(id="t1")] if self.asked == 1 else []
    async def fetch_transactions_async(self, size):
        return self.fetch_transactions(size)

class Sync(ConsumerTask):
    def process_transaction(self, given):
        print("started", given.id, flush=True)
        sys.stdin.readline()
        print("ended", given.id, flush=True)

class Async(AsyncConsumerTask):
    async def process_transaction(self, given):
        print("started", given.id, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("ended", given.id, flush=True)

asynchronous = sys.argv[1] == "asyncio"
task = (Async if asynchronous else Sync)(connectors={"source": Source()})
"""


def run_process(mode: str, body: str, *signals: int) -> tuple[int, list[str]]:
    """A process that consumes, sent these signals while its first transaction waits for a line of input."""
    code = PROCESS + textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-c", code, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    for number in signals:
        process.send_signal(number)
        # Long enough for a slow process to notice it.
        time.sleep(SHORT)
    try:
        rest, errors = process.communicate("\n", timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        rest, errors = process.communicate()
        raise AssertionError(f"it did not end; it said {first + rest!r} and {errors!r}") from None
    return process.returncode, (first + rest).splitlines() + (
        errors.splitlines() if process.returncode else []
    )


@pytest.mark.req("CE-31")
@pytest.mark.parametrize("count", [1, 3])
def test_stop_from_a_signal_handler_ends_the_loop_when_its_work_is_done(world: World, count: int) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: task.stop())
    report = asyncio.run(task.consume_transactions(POLICY)) if asynchronous else task.consume_transactions(POLICY)
    print(report.stop_reason, report.succeeded)
    """
    code, lines = run_process(world.mode, body, *[signal.SIGTERM] * count)
    assert code == 0, lines
    assert lines == ["started t0", "ended t0", "started t1", "ended t1", "stopped 2"]


# ── batches and continuous mode ─────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-18")
def test_in_batch_mode_the_next_fetch_waits_for_the_batch(world: World) -> None:
    ended: list[str] = []
    source = ListSource(transactions(8))
    at_fetch: list[int] = []
    source.on_fetch = lambda: at_fetch.append(len(ended))
    task = world.consumer(
        lambda each: After(0.02 if each.payload % 4 == 0 else 0),
        success=lambda each, _: ended.append(each.id),
        source=source,
    )
    world.consume(task, consuming(batch=4, concurrency=2))
    assert at_fetch == [0, 4, 8]


@pytest.mark.req("CE-18")
def test_in_continuous_mode_a_slow_transaction_idles_no_slot_across_batches(world: World) -> None:
    ended: list[str] = []
    task = world.consumer(
        lambda each: Until(lambda: len(ended) == 39) if each.id == "t0" else None,
        success=lambda each, _: ended.append(each.id),
        source=ListSource(transactions(40)),
    )
    report = within(40, world.consume, task, consuming(batch=4, concurrency=2, mode="continuous"))
    assert report.succeeded == 40
    assert ended[-1] == "t0"


@pytest.mark.req("CE-18", "CE-32")
def test_continuous_mode_holds_no_more_than_it_needs_to_keep_its_slots_full(world: World) -> None:
    gate = threading.Event()
    source = ListSource(transactions(100))
    task = world.consumer(lambda _: Until(gate.is_set), source=source)
    timer = threading.Timer(0.3, gate.set)
    seen: list[int] = []
    timer.function = lambda: (seen.append(100 - len(source.items)), gate.set())
    timer.start()
    world.consume(task, consuming(batch=5, concurrency=3, mode="continuous"))
    timer.join()
    assert seen[0] <= 2 * 3 + 5


@pytest.mark.req("CE-31")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_a_streaming_loop_takes_up_work_that_comes_later(world: World, mode: str) -> None:
    source = ListSource(script=[transactions(2), [], [], transactions(2, 2), [], transactions(1, 4)])
    task = world.consumer(source=source)
    policy = consuming(streaming=True, limit=5, mode=mode, empty_queue=EmptyQueuePolicy(backoff=0.001))
    assert world.consume(task, policy).succeeded == 5


@pytest.mark.req("CE-31")
def test_a_loop_error_names_itself_and_carries_its_report_when_pickled(world: World) -> None:
    import pickle

    source = ListSource(script=[transactions(1), OSError("down")])
    with pytest.raises(LoopError) as raised:
        world.consume(world.consumer(source=source))
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.report == raised.value.report
    assert str(again) == str(raised.value)
