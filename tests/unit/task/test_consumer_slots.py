"""How many transactions run at once, and which never run together."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward import Transaction
from onceward.task.exceptions import ConsumerLoopTimeoutException, ExceptionCategory
from onceward.task.report import StopReason
from onceward.task.settings import EngineSettings
from tests.support.world import (
    SHORT,
    After,
    Deaf,
    ListSource,
    SettlingSource,
    Until,
    World,
    consuming,
    results,
    retry,
    transactions,
    within,
)

pytestmark = pytest.mark.timeout(60)

MODES = ["threads", "asyncio"]


class Gauge:
    """How many are between `enter` and `leave`, by any key, and the maximum so far."""

    def __init__(self) -> None:
        self.now: Counter[Any] = Counter()
        self.peak: Counter[Any] = Counter()
        self._lock = threading.Lock()

    def enter(self, key: Any = None) -> None:
        with self._lock:
            self.now[key] += 1
            self.peak[key] = max(self.peak[key], self.now[key])

    def leave(self, key: Any = None) -> None:
        with self._lock:
            self.now[key] -= 1


def gauged(world: World, gauge: Gauge, source: Any, during: Any = None, key: Any = lambda _: None) -> Any:
    """A consumer that counts lives from the beginning of process to the end of the success handler."""

    def process(given: Transaction) -> Any:
        gauge.enter(key(given))
        return during(given) if callable(during) else during

    return world.consumer(process, success=lambda given, _: gauge.leave(key(given)), source=source)


def x(number: int) -> Transaction:
    return Transaction(id="x", payload=number)


# ── bounds ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-16", "CE-17")
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_all_slots_are_used_and_no_more(world: World, size: int, mode: str) -> None:
    gauge = Gauge()
    task = gauged(
        world,
        gauge,
        ListSource(transactions(20)),
        lambda _: Until(lambda: gauge.peak[None] >= size, After(0.005)),
    )
    report = world.consume(task, consuming(concurrency=size, batch=7, mode=mode))
    assert gauge.peak[None] == size
    assert report.succeeded == 20


@pytest.mark.req("CE-16", "CE-17")
def test_a_batch_smaller_than_the_pool_starts_only_as_many_workers(world: World) -> None:
    before = threading.active_count()
    seen: list[int] = []
    task = world.consumer(lambda _: seen.append(threading.active_count()), source=ListSource(transactions(2)))
    world.consume(task, consuming(concurrency=50))
    assert max(seen) - before <= 4


@pytest.mark.req("CE-18")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_one_slow_transaction_does_not_idle_the_other_slots_of_its_batch(world: World, mode: str) -> None:
    done: list[str] = []
    task = world.consumer(
        lambda given: Until(lambda: len(done) == 9) if given.id == "t0" else None,
        success=lambda given, _: done.append(given.id),
        source=ListSource(transactions(10)),
    )
    assert world.consume(task, consuming(concurrency=2, mode=mode)).succeeded == 10
    assert done[-1] == "t0"


@pytest.mark.req("CE-18")
def test_a_slow_retry_does_not_idle_the_other_slots(world: World) -> None:
    done: list[str] = []
    first = results(OSError(), None)
    task = world.consumer(
        lambda given: first() if given.id == "t0" else After(0.001),
        success=lambda given, _: done.append(given.id),
        source=ListSource(transactions(6)),
    )
    world.consume(task, consuming(concurrency=2, process=retry(2, backoff=1.0)))
    assert done[-1] == "t0"


@pytest.mark.req("CE-32")
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(0, 25),
    batch=st.integers(1, 8),
    concurrency=st.integers(1, 6),
    loop=st.sampled_from(["batch", "continuous"]),
)
def test_the_limit_is_reached_and_never_exceeded(
    mode: str, limit: int, batch: int, concurrency: int, loop: str
) -> None:
    world = World(mode)
    source = ListSource(transactions(60))
    report = world.consume(
        world.consumer(source=source),
        consuming(limit=limit, batch=batch, concurrency=concurrency, mode=loop),
    )
    assert len(world.calls) == limit
    assert report.stop_reason is StopReason.LIMIT
    assert len(source.items) == 60 - limit


@pytest.mark.req("CE-32")
def test_failed_transactions_count_for_the_limit(world: World) -> None:
    task = world.consumer(results(OSError()), source=ListSource(transactions(9)))
    report = world.consume(task, consuming(limit=4, batch=3, process=retry(2)))
    assert (report.failed, len(world.calls)) == (4, 8)


@pytest.mark.req("CE-39")
def test_at_concurrency_one_everything_is_in_order(world: World) -> None:
    task = world.consumer(
        lambda each: OSError() if each.payload % 3 == 0 else None,
        success=results(None),
        exception=results(None),
        source=ListSource(transactions(9)),
    )
    world.consume(task, consuming(batch=4, process=retry(2)))
    expected = []
    for number in range(9):
        steps = ["process", "process", "exception"] if number % 3 == 0 else ["process", "success"]
        expected += [(step, f"t{number}") for step in steps]
    assert world.calls == expected


# ── one id, several deliveries ──────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-34")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_the_same_id_never_runs_twice_at_once(world: World, mode: str) -> None:
    gauge = Gauge()
    batch = [Transaction(id=f"x{number % 3}", payload=number) for number in range(24)]
    task = gauged(world, gauge, ListSource(batch), After(0.003), key=lambda each: each.id)
    report = world.consume(task, consuming(concurrency=8, batch=5, mode=mode))
    assert report.succeeded == 24
    assert set(gauge.peak.values()) == {1}


@pytest.mark.req("CE-34")
def test_the_second_of_an_id_waits_for_the_whole_life_of_the_first(world: World) -> None:
    task = world.consumer(
        lambda each: After(0.05, OSError() if each.payload == 1 else None),
        success=lambda *_: After(0.02),
        exception=lambda *_: After(0.05),
        source=ListSource([x(1), x(2)]),
    )
    world.consume(task, consuming(concurrency=8, process=retry(2, backoff=0.05)))
    assert world.steps_of("x") == ["process", "process", "exception", "process", "success"]


@pytest.mark.req("CE-34")
def test_one_that_waits_for_its_id_takes_no_slot(world: World) -> None:
    done: list[Any] = []
    task = world.consumer(
        lambda each: Until(lambda: {"a", "b", "c"} <= set(done)) if each.payload == 1 else None,
        success=lambda each, _: done.append(each.payload if each.id == "x" else each.id),
        source=ListSource([x(1), x(2), x(3), *(Transaction(id=name) for name in "abc")]),
    )
    assert world.consume(task, consuming(concurrency=2)).succeeded == 6
    assert set(done[:3]) == {"a", "b", "c"}


@pytest.mark.req("CE-34")
def test_the_same_id_waits_across_batches(world: World) -> None:
    gauge = Gauge()
    second_fetched = threading.Event()
    source = ListSource(script=[[x(1)], [x(2)], [x(3)]])
    source.on_fetch = lambda: second_fetched.set() if len(source.asked) == 3 else None
    task = gauged(
        world, gauge, source, lambda _: Until(second_fetched.is_set, After(0.02)), lambda each: each.id
    )
    report = world.consume(task, consuming(concurrency=4, mode="continuous"))
    assert report.succeeded == 3
    assert gauge.peak["x"] == 1


@pytest.mark.req("CE-34")
def test_the_same_id_waits_across_calls_on_one_task(world: World) -> None:
    gauge = Gauge()
    source = ListSource(script=[[x(1)], [x(2)]])
    both = threading.Event()
    source.on_fetch = lambda: both.set() if len(source.asked) >= 2 else None
    task = gauged(world, gauge, source, lambda _: Until(both.is_set, After(0.05)), lambda each: each.id)
    policy = consuming(concurrency=2, limit=1)
    reports = within(20, world.run_together, *[(task.consume_transactions, policy)] * 2)
    assert [report.succeeded for report in reports] == [1, 1]
    assert gauge.peak["x"] == 1


@pytest.mark.req("CE-34")
def test_deliveries_of_one_id_run_in_the_order_of_arrival(world: World) -> None:
    done: list[int] = []
    task = world.consumer(
        lambda each: After({"y": 0.3}.get(each.id, 0.1 if each.payload == 1 else 0)),
        success=lambda each, _: done.append(each.payload) if each.id == "x" else None,
        source=ListSource([x(1), x(2), Transaction(id="y"), x(3)]),
    )
    world.consume(task, consuming(concurrency=2))
    assert done == [1, 2, 3]


@pytest.mark.req("CE-34", "CE-31")
def test_deliveries_that_wait_for_their_id_do_not_keep_a_stopped_loop_from_ending(world: World) -> None:
    source = SettlingSource([x(1), x(2), x(3), x(4), *transactions(1)])
    waiting = threading.Event()

    def process(each: Transaction) -> Any:
        if each.id != "x":
            # The only free worker gets here after it has put aside the other deliveries of the id.
            waiting.set()
            return None
        return Until(waiting.is_set, After(0.1))

    def stop_when_waiting(*_: Any) -> None:
        task.stop()

    task = world.consumer(process, success=stop_when_waiting, source=source)
    report = within(10, world.consume, task, consuming(concurrency=2))
    assert report.stop_reason is StopReason.STOPPED
    assert report.succeeded + report.unstarted == 5


@pytest.mark.req("CE-34")
def test_a_call_that_ended_leaves_nobody_in_line_for_an_id(world: World) -> None:
    go_on = threading.Event()
    source = ListSource(script=[[x(1), x(2)], [x(3), *transactions(1)]])

    def process(each: Transaction) -> Any:
        if each.id == "t0":
            go_on.set()
        return Deaf(go_on) if each.payload == 1 else None

    task = world.consumer(process, source=source)
    ends = within(
        15,
        world.consume_in_turn,
        task,
        consuming(concurrency=2, timeout=2 * SHORT),
        consuming(concurrency=2, limit=2),
    )
    assert isinstance(ends[0], ConsumerLoopTimeoutException)
    assert ends[1].succeeded == 2


@pytest.mark.req("CE-34")
def test_one_whose_id_is_stuck_fails_as_timeout_and_is_not_started(world: World) -> None:
    never = threading.Event()
    ends: list[Any] = []
    task = world.consumer(
        lambda _: Deaf(never),
        exception=lambda each, error: ends.append((each.payload, error.category)),
        source=ListSource([x(1), x(2), x(3)]),
        settings=EngineSettings(stuck_grace=0.1),
    )
    report = world.consume_then(task, consuming(concurrency=3, process=retry(3, timeout=SHORT)), never.set)
    timeout = ExceptionCategory.TIMEOUT
    assert sorted(ends) == [(1, timeout), (2, timeout), (3, timeout)]
    assert world.steps_of("x").count("process") == 1
    assert (report.failed, report.stuck) == (3, 1)


@pytest.mark.req("CE-34")
def test_an_id_is_free_again_when_its_stuck_attempt_has_ended(world: World) -> None:
    end = threading.Event()
    # The second delivery is fetched after the first attempt has left.
    source = ListSource(script=[[x(1)], Until(lambda: not task._engine.ids.holders, [x(2)])])
    source.on_fetch = lambda: end.set() if len(source.asked) == 2 else None
    task = world.consumer(
        lambda each: Deaf(end) if each.payload == 1 else "fine",
        source=source,
        settings=EngineSettings(stuck_grace=0.05),
    )
    report = world.consume(task, consuming(process=retry(1, timeout=SHORT)))
    assert (report.failed, report.succeeded, report.stuck) == (1, 1, 1)


@pytest.mark.req("CE-16", "CE-17")
def test_two_calls_on_one_task_have_slots_of_their_own(world: World) -> None:
    gauge = Gauge()
    source = ListSource(transactions(12))
    lock = threading.Lock()
    take = source._next

    def locked(size: int, extra: dict[str, Any]) -> Any:
        with lock:
            return take(size, extra)

    source._next = locked  # type: ignore[method-assign]
    task = gauged(world, gauge, source, lambda _: Until(lambda: gauge.peak[None] >= 4, After(0.002)))
    policy = consuming(concurrency=2, batch=3)
    reports = within(20, world.run_together, *[(task.consume_transactions, policy)] * 2)
    assert sum(report.succeeded for report in reports) == 12
    assert gauge.peak[None] == 4
