"""Sources that wait for work: the engine lets them, and does its chores meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from onceward.task import loops
from onceward.task import source as engine_source
from onceward.task.mixins.policies import EmptyQueuePolicy
from onceward.testing.clock import FakeClock
from tests.support.world import (
    After,
    SettlingSource,
    Until,
    World,
    consuming,
    resolve,
    resolve_async,
    transactions,
    within,
)

pytestmark = pytest.mark.req("WK-01")


class WaitingSource(SettlingSource):
    """Waits as long as it is asked to, unless `on_wait` says otherwise."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.waited: list[float] = []
        self.on_wait: Callable[[float], Any] = lambda seconds: After(seconds, False)

    def await_transactions(self, seconds: float) -> Any:
        self.waited.append(seconds)
        return resolve(self.on_wait(seconds))

    async def await_transactions_async(self, seconds: float) -> Any:
        self.waited.append(seconds)
        return await resolve_async(self.on_wait(seconds))


def test_a_source_that_can_wait_does_so_after_an_empty_fetch_and_says_when_to_fetch(world: World) -> None:
    source = WaitingSource(script=[[], [], transactions(1)])
    source.on_wait = lambda _: True
    began = time.monotonic()
    report = world.consume(world.consumer(source=source), consuming(streaming=True, limit=1))
    assert report.succeeded == 1
    assert source.waited == [pytest.approx(engine_source.LONGEST_WAIT, abs=1.0)] * 2
    assert time.monotonic() - began < engine_source.LONGEST_WAIT


def test_a_policy_that_says_how_long_to_wait_is_followed_to_the_letter(world: World) -> None:
    source, clock = WaitingSource(script=[[], [], transactions(1)]), FakeClock()
    policy = consuming(streaming=True, limit=1, empty_queue=EmptyQueuePolicy(backoff=3, backoff_multiplier=2))
    world.consume(world.consumer(source=source, clock=clock), policy)
    assert source.waited == []
    assert clock.sleeps == [3, 5]


def test_a_wait_without_news_is_followed_by_a_fetch_in_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_source, "LONGEST_WAIT", 0.05)
    source = WaitingSource(script=[[], transactions(1)])
    assert world.consume(world.consumer(source=source), consuming(streaming=True, limit=1)).succeeded == 1


def test_after_a_wait_that_fails_the_backoff_is_slept_and_the_next_fetch_reports_what_is_wrong(
    world: World,
) -> None:
    source, clock = WaitingSource(script=[[], [], transactions(1)]), FakeClock()

    def fail(_: float) -> Any:
        raise OSError("the line is down")

    source.on_wait = fail
    assert world.consume(
        world.consumer(source=source, clock=clock), consuming(streaming=True, limit=1)
    ).succeeded
    assert clock.sleeps == [0.1, 0.2]


def test_outcomes_are_settled_and_leases_extended_while_it_waits(world: World) -> None:
    source = WaitingSource(script=[transactions(2), []], lease=0.3)
    settled_and_extended = Until(lambda: source.reported and ["t1"] in source.extended)
    task = world.consumer(lambda each: settled_and_extended if each.id == "t1" else None, source=source)
    policy = consuming(streaming=True, mode="continuous", batch=2, concurrency=2)
    source.on_wait = lambda seconds: task.stop() if len(source.reported) == 2 else After(seconds, False)
    world.consume(task, policy)
    assert source.verdicts() == {"t0": "done", "t1": "done"}
    assert max(source.waited[:-1]) <= engine_source.SETTLE_INTERVAL + 0.001


@pytest.mark.req("WK-07")
def test_a_message_of_an_idle_source_is_done_and_settled_before_the_next_fetch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "HEAD_START", 30.0)
    source = WaitingSource(script=[transactions(1), transactions(2, 1)])
    settled_at_fetch: list[int] = []
    source.on_fetch = lambda: settled_at_fetch.append(len(source.reported))
    policy = consuming(streaming=True, mode="continuous", batch=10, concurrency=4, limit=3)
    began = time.monotonic()
    assert world.consume(world.consumer(source=source), policy).succeeded == 3
    assert settled_at_fetch == [0, 1]
    assert time.monotonic() - began < 30.0


@pytest.mark.req("WK-07")
def test_a_slow_message_of_an_idle_source_does_not_hold_up_the_next_fetch(world: World) -> None:
    source = WaitingSource(script=[transactions(1), transactions(1, 1)])
    task = world.consumer(
        lambda each: Until(lambda: not source.script) if each.id == "t0" else None, source=source
    )
    policy = consuming(streaming=True, mode="continuous", batch=10, concurrency=4, limit=2)
    assert within(40, world.consume, task, policy).succeeded == 2
