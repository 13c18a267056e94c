"""The exception handler is entered exactly once, also if the lifecycle's time runs out between a failure and it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from onceward.task.exceptions import ExceptionCategory
from onceward.task.work import OutcomeStatus
from onceward.testing.clock import FakeClock
from tests.support.world import (
    ListSource,
    World,
    business,
    consuming,
    producing,
    retry,
    system,
    timeout,
    transactions,
)

pytestmark = pytest.mark.timeout(120)

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory
LIMIT = 10.0
ROLES = pytest.mark.parametrize("role", ["consumer", "producer"])


def run_one(world: World, role: str, clock: FakeClock, loop: dict[str, Any], **steps: Any) -> Any:
    [one] = transactions(1)
    limits = {"exception": retry(3), "success": retry(1)}
    if role == "consumer":
        task = world.consumer(**steps, clock=clock)
        return world.run(task.start_processing, one, consuming(**limits, **loop))
    steps["produce"] = steps.pop("process")
    task = world.producer(**steps, clock=clock)
    return world.run(task.start_producing, one, producing(**limits, **loop))


@pytest.mark.req("CE-09", "CE-19")
@ROLES
@pytest.mark.parametrize("late_by", [-0.001, 0.0, 0.001, LIMIT])
@pytest.mark.parametrize("error", [business(), system(), timeout(), OSError()], ids=repr)
@pytest.mark.parametrize("step", ["process", "success"])
def test_a_failure_around_the_limit_still_gets_its_handler(
    world: World, role: str, late_by: float, error: Exception, step: str
) -> None:
    clock = FakeClock()

    def fail_late(*_: Any) -> Any:
        clock.advance(LIMIT + late_by)
        return error

    steps: dict[str, Any] = {"process": lambda _: None, "success": lambda *_: None, step: fail_late}
    ended = run_one(
        world, role, clock, {"transaction_timeout": LIMIT}, **steps, exception=lambda *_: "handled"
    )
    assert world.steps_of("t0").count("exception") == 1
    assert ended.status is OutcomeStatus.FAILED
    # What failed is the error, not the time that ran out after it.
    assert ended.error is world.errors[0][1]
    assert ended.error is error or ended.error.__cause__ is error


class Leaping(FakeClock):
    """A clock that leaps with every look at it once it is asked to, like that of a computer that was asleep."""

    leap = 0.0

    def now(self) -> float:
        self.advance(self.leap)
        return super().now()


@pytest.mark.req("CE-09")
@ROLES
def test_the_handler_is_entered_even_if_its_own_time_is_over_when_it_begins(world: World, role: str) -> None:
    clock = Leaping()

    def fail(*_: Any) -> Any:
        clock.leap = LIMIT + 1
        return business()

    def handle(*_: Any) -> None:
        clock.leap = 0.0

    run_one(world, role, clock, {"transaction_timeout": LIMIT}, process=fail, exception=handle)
    assert world.steps_of("t0").count("exception") == 1


@pytest.mark.req("CE-19")
@ROLES
def test_the_handler_of_a_late_failure_may_take_as_long_as_a_lifecycle_but_not_longer(
    world: World, role: str
) -> None:
    clock = FakeClock()

    def fail_late(*_: Any) -> Any:
        clock.advance(LIMIT - 1)
        return business()

    def slow(*_: Any) -> Any:
        clock.advance(LIMIT - 1 if len(world.errors) == 1 else 2)
        return system("again")

    ended = run_one(world, role, clock, {"transaction_timeout": LIMIT}, process=fail_late, exception=slow)
    assert world.steps_of("t0").count("exception") == 2  # the third would begin too late
    assert ended.error.category is TIMEOUT


@pytest.mark.req("CE-21")
@ROLES
def test_the_loops_own_limit_still_holds_for_the_handler(world: World, role: str) -> None:
    clock = FakeClock()

    def fail_late(*_: Any) -> Any:
        clock.advance(LIMIT - 1)
        return business()

    def slow(*_: Any) -> Any:
        clock.advance(LIMIT)
        return system("again")

    loop = {"transaction_timeout": LIMIT, "timeout": LIMIT + 5}
    with pytest.raises(TimeoutError):
        run_one(world, role, clock, loop, process=fail_late, exception=slow)
    assert world.steps_of("t0").count("exception") == 1


@pytest.mark.req("CE-09")
@ROLES
def test_every_failure_near_the_limit_has_its_handler_once(world: World, role: str) -> None:
    """Computing until about the limit: in asyncio nothing else gets a turn meanwhile."""
    limit, count = 0.02, 60

    def fail_near_the_limit(transaction: Any) -> Any:
        end = time.monotonic() + limit * (0.9 + 0.2 * transaction.payload / count)
        while time.monotonic() < end:
            pass
        return business()

    given = transactions(count)
    if role == "consumer":
        task = world.consumer(fail_near_the_limit, exception=lambda *_: None, source=ListSource(given))
        report = world.consume(task, consuming(transaction_timeout=limit, concurrency=2))
    else:
        task = world.producer(fail_near_the_limit, exception=lambda *_: None)
        report = world.produce(task, given, producing(transaction_timeout=limit, concurrency=2))
    entered = Counter(id_ for step, id_ in world.calls if step == "exception")
    assert entered == {each.id: 1 for each in given}
    assert report.failed == count
