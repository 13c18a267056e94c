"""What the engine reports to a settling source, when, and what it never reports."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from onceward import Transaction
from onceward.task.exceptions import (
    ConsumerLoopTimeoutException,
    FetchException,
    SettlementException,
)
from onceward.task.report import StopReason
from onceward.task.settings import EngineSettings
from onceward.testing.clock import FakeClock
from onceward.transaction import Settlement, Verdict
from tests.support.world import (
    SHORT,
    After,
    Deaf,
    ListSource,
    SettlingSource,
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

DONE, FAILED, RETURNED = Verdict


# ── verdicts ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-02")
def test_each_delivery_is_reported_its_own_end_once(world: World) -> None:
    batch = transactions(6)
    source = SettlingSource(batch)
    refused = business()
    task = world.consumer(lambda each: refused if each.id == "t2" else None, source=source)
    world.consume(task, consuming(batch=4))
    assert source.verdicts() == {each.id: FAILED if each.id == "t2" else DONE for each in batch}
    assert len(source.reported) == 6
    assert {id(reported.transaction) for reported in source.reported} == set(map(id, batch))
    errors = {reported.transaction.id: reported.error for reported in source.reported}
    assert errors.pop("t2") is refused
    assert set(errors.values()) == {None}


@pytest.mark.req("CE-07")
def test_a_failed_success_handler_is_a_failed_delivery(world: World) -> None:
    source = SettlingSource(transactions(1))
    world.consume(world.consumer(success=results(OSError()), source=source))
    assert source.verdicts() == {"t0": FAILED}


@pytest.mark.req("CE-08")
def test_a_failed_exception_handler_is_a_failed_delivery(world: World) -> None:
    source = SettlingSource(transactions(1))
    world.consume(world.consumer(results(OSError("p")), exception=results(OSError("e")), source=source))
    assert source.verdicts() == {"t0": FAILED}
    assert "e" in str(source.reported[0].error)


@pytest.mark.req("CE-20")
def test_a_stuck_transaction_is_a_failed_delivery(world: World) -> None:
    never = threading.Event()
    source = SettlingSource(transactions(1))
    task = world.consumer(lambda _: Deaf(never), source=source, settings=EngineSettings(stuck_grace=0.05))
    world.consume_then(task, consuming(process=retry(1, timeout=0.05)), never.set)
    assert source.verdicts() == {"t0": FAILED}


@pytest.mark.req("CE-02")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_nothing_is_settled_before_its_last_handler_has_ended(world: World, mode: str) -> None:
    ended: set[str] = set()
    early: list[str] = []
    source = SettlingSource(transactions(60))

    def watching(settlements: Sequence[Settlement]) -> None:
        early.extend(
            reported.transaction.id for reported in settlements if reported.transaction.id not in ended
        )

    tell, tell_async = source.settle_transactions, source.settle_transactions_async

    def settle(settlements: Sequence[Settlement]) -> None:
        watching(settlements)
        tell(settlements)

    async def settle_async(settlements: Sequence[Settlement]) -> None:
        watching(settlements)
        await tell_async(settlements)

    source.settle_transactions = settle  # type: ignore[method-assign]
    source.settle_transactions_async = settle_async  # type: ignore[method-assign]

    def end(each: Transaction, *_: Any) -> None:
        time.sleep(0.001)
        ended.add(each.id)

    task = world.consumer(
        lambda each: business() if each.payload % 4 == 0 else After(0.002),
        success=end,
        exception=end,
        source=source,
    )
    world.consume(task, consuming(batch=6, concurrency=4, mode=mode))
    assert early == []
    assert len(source.reported) == 60


@pytest.mark.req("CE-32")
@pytest.mark.parametrize("world_mode", ["threads", "asyncio"])
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    ids=st.lists(st.integers(0, 4), max_size=14),
    batch=st.integers(1, 5),
    concurrency=st.integers(1, 5),
    mode=st.sampled_from(["batch", "continuous"]),
    stop_at=st.integers(0, 20),
)
def test_every_delivery_is_settled_exactly_once_however_the_loop_ends(
    world_mode: str, ids: list[int], batch: int, concurrency: int, mode: str, stop_at: int
) -> None:
    world = World(world_mode)
    given = [Transaction(id=f"x{number}") for number in ids]
    source = SettlingSource(given)
    task = world.consumer(
        lambda _: task.stop() if len(world.calls) == stop_at else After(0.0005), source=source
    )
    report = within(10, world.consume, task, consuming(batch=batch, concurrency=concurrency, mode=mode))
    handed_out = given[: len(given) - len(source.items)]
    assert Counter(id(reported.transaction) for reported in source.reported) == Counter(map(id, handed_out))
    verdicts = Counter(reported.verdict for reported in source.reported)
    assert (verdicts[DONE], verdicts[RETURNED]) == (report.succeeded, report.unstarted)
    assert verdicts[DONE] == len(world.calls)


# ── together ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-18")
def test_a_batch_of_quick_work_is_settled_in_few_calls(world: World) -> None:
    source = SettlingSource(transactions(100))
    world.consume(world.consumer(source=source), consuming(batch=50, concurrency=4))
    assert len(source.reported) == 100
    assert len(source.calls) <= 8


@pytest.mark.req("CE-18")
def test_a_batch_is_settled_before_the_next_is_fetched(world: World) -> None:
    source = SettlingSource(transactions(6))
    settled_at_fetch: list[int] = []
    source.on_fetch = lambda: settled_at_fetch.append(len(source.reported))
    world.consume(world.consumer(source=source), consuming(batch=3, concurrency=2))
    assert settled_at_fetch == [0, 3, 6]


@pytest.mark.req("CE-18")
def test_finished_work_is_settled_while_slow_work_goes_on(world: World) -> None:
    source = SettlingSource(transactions(4))
    task = world.consumer(
        lambda each: Until(lambda: len(source.reported) == 3) if each.id == "t0" else None, source=source
    )
    report = within(40, world.consume, task, consuming(concurrency=2))
    assert report.succeeded == 4


@pytest.mark.req("CE-18")
def test_in_continuous_mode_finished_work_is_settled_while_slow_work_and_fetching_go_on(world: World) -> None:
    source = Trickle()
    source.enough = lambda: bool(source.reported)
    task = world.consumer(
        lambda each: Until(lambda: source.dry) if each.id == "slow" else None, source=source
    )
    world.consume(task, consuming(concurrency=4, mode="continuous"))
    assert source.had_enough


@pytest.mark.req("CE-18")
def test_in_continuous_mode_leases_are_extended_while_fetching_goes_on(world: World) -> None:
    source = Trickle(lease=0.3)
    source.enough = lambda: any("slow" in ids for ids in source.extended)
    task = world.consumer(
        lambda each: Until(lambda: source.dry) if each.id == "slow" else None, source=source
    )
    world.consume(task, consuming(concurrency=4, mode="continuous"))
    assert source.had_enough


class Trickle(SettlingSource):
    """One slow transaction, then quick ones, one per fetch, until `enough` holds or a while has passed."""

    enough: Callable[[], bool]
    dry = had_enough = False

    def _next(self, size: int, extra: dict[str, Any]) -> Any:
        self.asked.append((size, extra))
        number = len(self.asked)
        if number == 1:
            return [Transaction(id="slow")]
        self.had_enough = self.had_enough or self.enough()
        self.dry = self.had_enough or number > 300
        return [] if self.dry else After(0.02, [Transaction(id=f"q{number}")])


# ── leases ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-19")
def test_the_leases_of_slow_work_are_extended_until_it_is_settled(world: World) -> None:
    source = SettlingSource(transactions(3), lease=0.15)
    task = world.consumer(
        lambda each: Until(only_its_own, limit=10) if each.id == "t1" else None, source=source
    )

    def only_its_own() -> bool:
        # A settled transaction needs no lease.
        return len(source.extended) >= 3 and source.extended[-1] == ["t1"]

    assert world.consume(task, consuming(concurrency=2)).succeeded == 3
    assert all("t1" in extended for extended in source.extended)


@pytest.mark.req("CE-19")
def test_the_leases_of_work_that_waits_for_a_slot_are_extended(world: World) -> None:
    source = SettlingSource(transactions(2), lease=0.15)
    task = world.consumer(
        lambda each: Until(lambda: source.extended) if each.id == "t0" else None, source=source
    )
    world.consume(task, consuming(concurrency=1))
    assert source.extended[0] == ["t0", "t1"]


@pytest.mark.req("CE-19")
def test_leases_are_extended_while_a_stopped_loop_finishes_its_work(world: World) -> None:
    source = SettlingSource(transactions(1), lease=0.15)

    def process(_: Transaction) -> Any:
        task.stop()
        return Until(lambda: len(source.extended) >= 2)

    task = world.consumer(process, source=source)
    assert within(40, world.consume, task).succeeded == 1


@pytest.mark.req("CE-19")
def test_leases_are_extended_while_a_settlement_is_tried_again(world: World) -> None:
    source = SettlingSource(transactions(2), lease=0.15)

    def down_until_extended() -> None:
        if len(source.extended) < 2:
            raise OSError("the source is away")

    source.on_settle = down_until_extended
    policy = consuming(fetch=retry(3, backoff=0.2))
    assert within(40, world.consume, world.consumer(source=source), policy).succeeded == 2
    assert source.verdicts() == {"t0": DONE, "t1": DONE}


@pytest.mark.req("CE-19")
def test_quick_work_needs_no_extension(world: World) -> None:
    source = SettlingSource(transactions(20), lease=60)
    world.consume(world.consumer(source=source))
    assert source.extended == []


@pytest.mark.req("CE-36")
def test_a_failing_extension_is_logged_and_ends_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source = SettlingSource(transactions(1), lease=0.15)
    tried: list[int] = []

    def failing(given: Sequence[Transaction]) -> Any:
        tried.append(len(given))
        raise OSError("lease store down")

    async def failing_async(given: Sequence[Transaction]) -> Any:
        failing(given)

    source.extend_transactions = failing  # type: ignore[method-assign]
    source.extend_transactions_async = failing_async  # type: ignore[method-assign]
    task = world.consumer(lambda _: Until(lambda: len(tried) >= 2), source=source)
    assert world.consume(task).succeeded == 1
    assert source.verdicts() == {"t0": DONE}
    assert "lease store down" in caplog.text


@pytest.mark.req("CE-10")
def test_a_source_may_settle_without_leases(world: World) -> None:
    class Settling(ListSource):
        reported: list[Settlement] = []  # noqa: RUF012

        def settle_transactions(self, settlements: Sequence[Settlement]) -> None:
            self.reported.extend(settlements)

        async def settle_transactions_async(self, settlements: Sequence[Settlement]) -> None:
            self.reported.extend(settlements)

    source = Settling(transactions(2))
    source.reported = []
    world.consume(world.consumer(source=source))
    assert [reported.verdict for reported in source.reported] == [DONE, DONE]


# ── ends of the loop ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-31")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_on_stop_work_that_has_not_started_is_returned(world: World, mode: str) -> None:
    source = SettlingSource(transactions(8))

    def process(_: Transaction) -> Any:
        task.stop()
        return After(0.1)

    task = world.consumer(process, source=source)
    report = world.consume(task, consuming(batch=8, concurrency=2, mode=mode))
    assert report.stop_reason is StopReason.STOPPED
    assert Counter(source.verdicts().values()) == {DONE: report.succeeded, RETURNED: report.unstarted}
    assert report.succeeded <= 3
    assert {name for name, verdict in source.verdicts().items() if verdict is DONE} == {
        name for _, name in world.calls
    }


@pytest.mark.req("CE-31")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_on_stop_work_that_has_not_started_is_returned_while_the_rest_still_runs(
    world: World, mode: str
) -> None:
    source = SettlingSource(transactions(4))

    def process(_: Transaction) -> Any:
        task.stop()
        return Until(lambda: Counter(source.verdicts().values())[RETURNED] == 3)

    task = world.consumer(process, source=source)
    report = world.consume(task, consuming(batch=4, mode=mode))
    assert (report.succeeded, report.unstarted) == (1, 3)
    assert source.verdicts() == {"t0": DONE, "t1": RETURNED, "t2": RETURNED, "t3": RETURNED}


@pytest.mark.req("CE-21")
def test_on_a_loop_timeout_work_that_has_not_started_is_returned_and_the_rest_left_to_the_lease(
    world: World,
) -> None:
    source = SettlingSource(transactions(5))
    task = world.consumer(lambda each: Until(lambda: False) if each.id == "t1" else None, source=source)
    with pytest.raises(ConsumerLoopTimeoutException):
        world.consume(task, consuming(timeout=2 * SHORT))
    assert source.verdicts() == {"t0": DONE, "t2": RETURNED, "t3": RETURNED, "t4": RETURNED}


@pytest.mark.req("CE-21")
def test_what_the_loop_timeout_kept_from_being_reported_is_reported_at_the_end(world: World) -> None:
    source = SettlingSource(transactions(2))
    source.on_settle = results(Until(lambda: False), None)
    task = world.consumer(lambda each: Until(lambda: False) if each.id == "t1" else None, source=source)
    with pytest.raises(ConsumerLoopTimeoutException):
        world.consume(task, consuming(timeout=2 * SHORT, concurrency=2))
    assert source.verdicts() == {"t0": DONE}


@pytest.mark.req("CE-13")
def test_on_a_fetch_error_what_has_been_done_is_settled(world: World) -> None:
    source = SettlingSource(script=[transactions(3), OSError()])
    task = world.consumer(lambda _: After(0.05), source=source)
    with pytest.raises(FetchException):
        world.consume(task, consuming(concurrency=4, mode="continuous"))
    assert source.verdicts() == {"t0": DONE, "t1": DONE, "t2": DONE}


@pytest.mark.req("CE-31")
def test_an_exit_settles_what_was_done_and_returns_what_was_not_started(world: World) -> None:
    source = SettlingSource(transactions(5))
    task = world.consumer(lambda each: SystemExit(3) if each.id == "t1" else None, source=source)
    with pytest.raises(SystemExit):
        world.consume(task)
    assert source.verdicts() == {"t0": DONE, "t2": RETURNED, "t3": RETURNED, "t4": RETURNED}


# ── failures to settle ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-11")
def test_a_failing_settlement_is_tried_again_within_the_fetch_policy(world: World) -> None:
    clock = FakeClock()
    source = SettlingSource(transactions(3))
    source.on_settle = results(OSError(), OSError(), None)
    task = world.consumer(source=source, clock=clock)
    world.consume(task, consuming(fetch=retry(3, backoff=1, backoff_multiplier=2)))
    assert clock.sleeps == [1, 2]
    assert len(source.reported) == 3


@pytest.mark.req("CE-11", "CE-31")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_a_failing_settlement_is_tried_again_after_stop_as_well(world: World, mode: str) -> None:
    source = SettlingSource(transactions(3))
    source.on_settle = results(OSError(), OSError(), None)
    task = world.consumer(lambda _: task.stop(), source=source)
    report = world.consume(task, consuming(fetch=retry(3, backoff=0.01), mode=mode))
    assert report.stop_reason is StopReason.STOPPED
    assert set(source.verdicts().values()) <= {DONE, RETURNED}
    assert len(source.reported) == 3


@pytest.mark.req("CE-11", "CE-13")
def test_a_failing_settlement_is_tried_again_after_a_fetch_error_as_well(world: World) -> None:
    source = SettlingSource(script=[transactions(2), OSError("fetch"), OSError("fetch")])
    source.on_settle = results(OSError("settle"), None)
    task = world.consumer(lambda _: Until(lambda: len(source.asked) == 3, After(0.1)), source=source)
    with pytest.raises(FetchException):
        world.consume(task, consuming(fetch=retry(2), concurrency=4, mode="continuous"))
    assert source.verdicts() == {"t0": DONE, "t1": DONE}


@pytest.mark.req("CE-31", "CE-36")
def test_a_settlement_that_fails_for_good_ends_the_loop_and_keeps_its_cause(world: World) -> None:
    cause = ConnectionError("gone")
    source = SettlingSource(transactions(9))
    source.on_settle = results(cause)
    with pytest.raises(SettlementException) as raised:
        world.consume(world.consumer(source=source), consuming(batch=3, fetch=retry(2)))
    assert raised.value.__cause__ is cause
    assert raised.value.report is not None
    assert raised.value.report.stop_reason is StopReason.SETTLE_ERROR
    assert raised.value.report.succeeded == 3
    assert len(source.asked) == 1


@pytest.mark.req("CE-20")
def test_settling_has_the_time_limit_of_the_fetch_policy(world: World) -> None:
    source = SettlingSource(transactions(2))
    source.on_settle = results(Until(lambda: False), None)
    task = world.consumer(source=source)
    report = world.consume(task, consuming(fetch=retry(2, timeout=SHORT)))
    assert report.timed_out == 1
    assert len(source.reported) == 2


# ── sources that do not settle ──────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-10")
def test_a_source_needs_nothing_but_fetch(world: World) -> None:
    class Bare:
        __slots__ = ("batches",)

        def __init__(self) -> None:
            self.batches = [transactions(2), transactions(3, 2)]

        def fetch_transactions(self, size: int) -> list[Transaction]:
            return self.batches.pop() if self.batches else []

        async def fetch_transactions_async(self, size: int) -> list[Transaction]:
            return self.fetch_transactions(size)

    assert world.consume(world.consumer(source=Bare())).succeeded == 5


@pytest.mark.req("CE-31")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_what_a_source_that_does_not_settle_has_handed_out_is_finished_on_stop(
    world: World, mode: str
) -> None:
    source = ListSource(transactions(20))

    def process(_: Transaction) -> Any:
        task.stop()
        return After(0.01)

    task = world.consumer(process, source=source)
    report = world.consume(task, consuming(batch=6, concurrency=2, mode=mode))
    assert report.succeeded == 20 - len(source.items)
    assert report.succeeded >= 6
    assert report.unstarted == 0


@pytest.mark.req("CE-34")
def test_a_stuck_delivery_is_reported_only_when_its_attempt_has_ended(world: World) -> None:
    released = threading.Event()
    source = SettlingSource(transactions(2))
    given_up: list[float] = []
    settled_meanwhile: list[dict[str, str]] = []

    def look() -> bool:
        """While t1 is in flight: t0 was given up on a while ago, long enough for a settlement to be due."""
        if given_up and not released.is_set():
            settled_meanwhile.append(source.verdicts())
            if time.monotonic() > given_up[0] + 0.6:
                released.set()
        return "t0" in source.verdicts()

    task = world.consumer(
        lambda each: Deaf(released, limit=30.0) if each.id == "t0" else None,
        success=lambda *_: Until(look),
        exception=lambda *_: given_up.append(time.monotonic()),
        source=source,
        settings=EngineSettings(stuck_grace=0.05),
    )
    world.consume_then(task, consuming(process=retry(1, timeout=SHORT), concurrency=2, batch=2), released.set)
    assert settled_meanwhile
    assert all("t0" not in reported for reported in settled_meanwhile)
    assert source.verdicts() == {"t0": FAILED, "t1": DONE}
