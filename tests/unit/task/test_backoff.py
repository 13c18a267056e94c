"""How long the engine waits before it retries."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onceward.task.mixins import utils
from onceward.task.mixins.policies import EmptyQueuePolicy
from onceward.task.mixins.utils import compute_backoff
from onceward.task.report import StopReason
from onceward.testing.clock import FakeClock
from tests.support.world import ListSource, World, consuming, results, retry, transactions

pytestmark = pytest.mark.timeout(60)

DELAY = st.floats(0, 1e6)
FACTOR = st.floats(1, 1e6)
ATTEMPT = st.integers(0, 10_000)


# ── the formula ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-24")
@pytest.mark.parametrize(
    ("backoff", "multiplier", "cap", "delays"),
    [
        (1, 2, 0, [1, 2, 4, 8, 16]),
        (0.5, 3, 0, [0.5, 1.5, 4.5, 13.5]),
        (1, 2, 5, [1, 2, 4, 5, 5]),
        (7, 1, 0, [7, 7, 7]),
        (7, 2, 3, [3, 3, 3]),
        (0, 2, 5, [0, 0, 0]),
        (0, 1, 0, [0, 0, 0]),
    ],
)
def test_delays_follow_the_formula(
    backoff: float, multiplier: float, cap: float, delays: list[float]
) -> None:
    assert [compute_backoff(backoff, multiplier, cap, attempt) for attempt in range(len(delays))] == delays


@pytest.mark.req("CE-24")
@pytest.mark.parametrize("attempt", [1023, 1024, 5000, 10**9])
def test_a_huge_exponent_does_not_overflow(attempt: int) -> None:
    assert compute_backoff(1.0, 2.0, 60.0, attempt) == 60.0
    assert math.isfinite(compute_backoff(1.0, 2.0, 0.0, attempt))
    assert compute_backoff(0.0, 2.0, 0.0, attempt) == 0.0


@pytest.mark.req("CE-24")
@given(DELAY, FACTOR, DELAY, ATTEMPT)
def test_a_delay_is_never_negative_never_above_its_cap_and_always_finite(
    backoff: float, multiplier: float, cap: float, attempt: int
) -> None:
    delay = compute_backoff(backoff, multiplier, cap, attempt)
    assert delay >= 0
    assert math.isfinite(delay)
    assert cap == 0 or delay <= cap


@pytest.mark.req("CE-24")
@given(DELAY, FACTOR, DELAY, ATTEMPT)
def test_delays_never_shrink_from_one_attempt_to_the_next(
    backoff: float, multiplier: float, cap: float, attempt: int
) -> None:
    assert compute_backoff(backoff, multiplier, cap, attempt) <= compute_backoff(
        backoff, multiplier, cap, attempt + 1
    )


@pytest.mark.req("CE-24")
@given(st.floats(0, 100), st.floats(1, 4), st.integers(0, 8))
def test_without_a_cap_the_delay_is_the_product(backoff: float, multiplier: float, attempt: int) -> None:
    assert compute_backoff(backoff, multiplier, 0, attempt) == backoff * multiplier**attempt


@pytest.mark.req("CE-24")
@given(st.floats(0.001, 1000), st.floats(1, 4), st.floats(0.001, 1000), st.integers(0, 8))
def test_a_cap_changes_only_what_is_above_it(
    backoff: float, multiplier: float, cap: float, attempt: int
) -> None:
    free = backoff * multiplier**attempt
    assume(free != cap)
    assert compute_backoff(backoff, multiplier, cap, attempt) == (free if free < cap else cap)


@pytest.mark.req("CE-24")
@pytest.mark.parametrize("cap", [0.0, 1e12, 1e300])
def test_no_delay_is_too_long_to_be_slept(cap: float) -> None:
    assert compute_backoff(1.0, 2.0, cap, 5000) < threading.TIMEOUT_MAX


@pytest.mark.req("CE-24")
def test_the_formula_is_the_one_that_tasks_can_use() -> None:
    assert utils.compute_backoff is compute_backoff


# ── in the steps ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-23", "CE-24")
def test_every_retry_is_preceded_by_its_delay_and_the_last_failure_by_none(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(results(OSError()), source=ListSource(transactions(1)), clock=clock)
    report = world.consume(task, consuming(process=retry(5, backoff=1, backoff_multiplier=2, backoff_cap=6)))
    assert clock.sleeps == [1, 2, 4, 6]
    assert len(world.calls) == 5
    assert report.retries == 4


@pytest.mark.req("CE-23")
@pytest.mark.parametrize("attempts", [1, 2, 7])
def test_max_attempts_counts_the_first(world: World, attempts: int) -> None:
    task = world.consumer(
        results(OSError()), exception=results(OSError()), source=ListSource(transactions(1))
    )
    world.consume(task, consuming(process=retry(attempts), exception=retry(attempts)))
    assert world.steps_of("t0") == ["process"] * attempts + ["exception"] * attempts


@pytest.mark.req("CE-24")
def test_without_backoff_there_is_no_sleep(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(results(OSError()), source=ListSource(transactions(1)), clock=clock)
    world.consume(task, consuming(process=retry(4)))
    assert clock.sleeps == []


@pytest.mark.req("CE-24")
def test_the_delays_of_the_next_transaction_begin_anew(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(results(OSError()), source=ListSource(transactions(2)), clock=clock)
    world.consume(task, consuming(process=retry(3, backoff=1, backoff_multiplier=2)))
    assert clock.sleeps == [1, 2, 1, 2]


@pytest.mark.req("CE-24")
def test_two_thousand_attempts_end_with_a_delay_that_can_be_slept(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(results(OSError()), source=ListSource(transactions(1)), clock=clock)
    world.consume(task, consuming(process=retry(2000, backoff=1, backoff_multiplier=2)))
    assert len(clock.sleeps) == 1999
    assert math.isfinite(sum(clock.sleeps))


# ── empty fetches ───────────────────────────────────────────────────────────────────────────────────────


def streaming(limit: int, **queue: float) -> object:
    return consuming(streaming=True, limit=limit, empty_queue=EmptyQueuePolicy(**queue))


@pytest.mark.req("CE-15")
def test_consecutive_empty_fetches_sleep_longer_and_longer_up_to_the_cap(world: World) -> None:
    clock = FakeClock()
    source = ListSource(script=[[], [], [], [], [], transactions(1)])
    task = world.consumer(source=source, clock=clock)
    report = world.consume(task, streaming(1, backoff=0.5, backoff_multiplier=2, backoff_cap=3))  # type: ignore[arg-type]
    assert clock.sleeps == [0.5, 1, 2, 3, 3]
    assert (report.fetches, report.empty_fetches) == (6, 5)
    assert report.stop_reason is StopReason.LIMIT


@pytest.mark.req("CE-15")
def test_a_batch_sets_the_count_of_empty_fetches_back(world: World) -> None:
    clock = FakeClock()
    source = ListSource(script=[[], [], transactions(1), [], [], [], transactions(1, 1)])
    task = world.consumer(source=source, clock=clock)
    world.consume(task, streaming(2, backoff=1, backoff_multiplier=2, backoff_cap=0))  # type: ignore[arg-type]
    assert clock.sleeps == [1, 2, 1, 2, 4]


@pytest.mark.req("CE-15")
def test_a_cap_of_zero_is_no_cap(world: World) -> None:
    clock = FakeClock()
    source = ListSource(script=[[]] * 8 + [transactions(1)])
    task = world.consumer(source=source, clock=clock)
    world.consume(task, streaming(1, backoff=10, backoff_multiplier=3, backoff_cap=0))  # type: ignore[arg-type]
    assert clock.sleeps == [10 * 3**n for n in range(8)]


@pytest.mark.req("CE-15", "CE-24")
def test_thousands_of_empty_fetches_do_not_overflow(world: World) -> None:
    clock = FakeClock()
    source = ListSource(script=[[]] * 3000 + [transactions(1)])
    task = world.consumer(source=source, clock=clock)
    report = world.consume(task, streaming(1, backoff=0.1, backoff_multiplier=2, backoff_cap=30))  # type: ignore[arg-type]
    assert report.succeeded == 1
    assert clock.sleeps[-1] == 30


@pytest.mark.req("CE-15")
def test_a_failing_fetch_is_not_an_empty_one(world: World) -> None:
    clock = FakeClock()
    source = ListSource(script=[[], OSError(), [], transactions(1)])
    task = world.consumer(source=source, clock=clock)
    policy = consuming(
        streaming=True,
        limit=1,
        empty_queue=EmptyQueuePolicy(backoff=1, backoff_multiplier=2, backoff_cap=0),
        fetch=retry(2, backoff=100),
    )
    world.consume(task, policy)
    assert clock.sleeps == [1, 100, 2]
