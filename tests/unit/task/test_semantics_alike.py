"""Threads and asyncio do the same things in the same order, and both follow the lifecycle's rules.

The rules are written here a second time, as plainly as possible and without the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from onceward.testing.clock import FakeClock
from tests.support.world import ListSource, SettlingSource, World, business, consuming, retry, system, timeout

pytestmark = pytest.mark.timeout(60)

ERRORS = {"business": business, "system": system, "timeout": timeout, "error": ValueError}
CATEGORY = {"business": "BUSINESS", "system": "SYSTEM", "timeout": "TIMEOUT", "error": "SYSTEM"}


@dataclass(frozen=True)
class Budget:
    attempts: int
    backoff: float
    multiplier: float
    cap: float

    def delay(self, attempt: int) -> float:
        delay = self.backoff * self.multiplier**attempt
        return min(delay, self.cap) if self.cap else delay


@dataclass(frozen=True)
class Scripted:
    """The script of each step of one transaction, attempt by attempt; after that it succeeds."""

    process: tuple[str, ...] = ()
    success: tuple[str, ...] = ()
    exception: tuple[str, ...] = ()


@dataclass
class Trace:
    """Everything observable at concurrency 1."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    sleeps: list[float] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    handed_over: list[tuple[str, str]] = field(default_factory=list)
    retries: int = 0


@dataclass(frozen=True)
class Case:
    scripts: tuple[Scripted, ...]
    process: Budget
    success: Budget
    exception: Budget
    batch: int


# ── the rules, again ────────────────────────────────────────────────────────────────────────────────────


def predicted(case: Case) -> Trace:
    trace = Trace()

    def step(name: str, of: str, script: tuple[str, ...], budget: Budget) -> str:
        """`ok`, or the kind of the final error."""
        for attempt in range(budget.attempts):
            trace.calls.append((name, of))
            end = script[attempt] if attempt < len(script) else "ok"
            if end in ("ok", "business"):
                return end
            if attempt + 1 < budget.attempts:
                trace.retries += 1
                if budget.delay(attempt):
                    trace.sleeps.append(budget.delay(attempt))
        return end

    for number, script in enumerate(case.scripts):
        name = f"t{number}"
        end = step("process", name, script.process, case.process)
        if end == "ok":
            end = step("success", name, script.success, case.success)
        if end == "ok":
            trace.outcomes[name] = "done"
            continue
        entered = len(trace.calls)
        last = step("exception", name, script.exception, case.exception)
        trace.handed_over += [(name, CATEGORY[end])] * (len(trace.calls) - entered)
        trace.outcomes[name] = CATEGORY[end] if last == "ok" else CATEGORY[last]
    return trace


# ── the engine ──────────────────────────────────────────────────────────────────────────────────────────


def observed(mode: str, case: Case) -> Trace:
    world, clock = World(mode), FakeClock()
    taken: dict[tuple[str, str], int] = {}

    def play(step: str) -> Any:
        def behaviour(each: Transaction, *_: Any) -> Any:
            attempt = taken[step, each.id] = taken.get((step, each.id), -1) + 1
            script: tuple[str, ...] = getattr(case.scripts[each.payload], step)
            end = script[attempt] if attempt < len(script) else "ok"
            return "r" if end == "ok" else ERRORS[end]()

        return behaviour

    source = SettlingSource([Transaction(id=f"t{n}", payload=n) for n in range(len(case.scripts))])
    task = world.consumer(
        play("process"), success=play("success"), exception=play("exception"), source=source, clock=clock
    )
    budgets = {
        name: retry(
            budget.attempts,
            backoff=budget.backoff,
            backoff_multiplier=budget.multiplier,
            backoff_cap=budget.cap,
        )
        for name in ("process", "success", "exception")
        for budget in [getattr(case, name)]
    }
    report = world.consume(task, consuming(batch=case.batch, **budgets))
    outcomes = {
        reported.transaction.id: "done" if reported.error is None else str(reported.error.category)
        for reported in source.reported
    }
    failed = [end for end in outcomes.values() if end != "done"]
    assert {str(kind): count for kind, count in report.failed_by_category.items() if count} == {
        kind: failed.count(kind) for kind in set(failed)
    }
    return Trace(
        calls=world.calls,
        sleeps=clock.sleeps,
        outcomes=outcomes,
        handed_over=[(name, str(error.category)) for name, error in world.errors],
        retries=report.retries,
    )


ENDS = st.lists(st.sampled_from(["ok", *ERRORS]), max_size=4).map(tuple)
BUDGETS = st.builds(
    Budget,
    attempts=st.integers(1, 4),
    backoff=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    multiplier=st.sampled_from([1.0, 2.0, 10.0]),
    cap=st.sampled_from([0.0, 0.25, 5.0]),
)
CASES = st.builds(
    Case,
    scripts=st.lists(st.builds(Scripted, process=ENDS, success=ENDS, exception=ENDS), max_size=5).map(tuple),
    process=BUDGETS,
    success=BUDGETS,
    exception=BUDGETS,
    batch=st.integers(1, 3),
)


@pytest.mark.req("CE-02", "CE-09", "CE-24", "CE-35")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
@settings(max_examples=150, deadline=None)
@given(CASES)
def test_the_engine_does_what_the_rules_say(mode: str, case: Case) -> None:
    assert observed(mode, case) == predicted(case)


@pytest.mark.req("CE-01")
@settings(max_examples=100, deadline=None)
@given(CASES)
def test_the_same_script_gives_the_same_calls_sleeps_and_outcomes_in_both_modes(case: Case) -> None:
    assert observed("threads", case) == observed("asyncio", case)


@pytest.mark.req("CE-39")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
@settings(max_examples=40, deadline=None)
@given(CASES)
def test_the_same_script_gives_the_same_run_again(mode: str, case: Case) -> None:
    assert observed(mode, case) == observed(mode, case)


# ── fetching ────────────────────────────────────────────────────────────────────────────────────────────


def fetched(mode: str, script: list[str], attempts: int, streaming: bool) -> tuple[Any, ...]:
    world, clock = World(mode), FakeClock()
    count = 0
    answers: list[Any] = []
    for kind in script:
        if kind == "error":
            answers.append(OSError("down"))
        else:
            size = 2 if kind == "full" else 0
            answers.append([Transaction(id=f"t{count + n}") for n in range(size)])
            count += size
    # A streaming loop ends at the limit, or with an error at the end of the script.
    source = ListSource(script=[*answers, *[OSError("over")] * 9])
    task = world.consumer(source=source, clock=clock)
    policy = consuming(fetch=retry(attempts, backoff=1, backoff_multiplier=2), streaming=streaming, limit=6)
    [end] = world.consume_in_turn(task, policy)
    report = end.report if isinstance(end, Exception) else end
    numbers = (report.succeeded, report.fetches, report.empty_fetches, report.retries, report.stop_reason)
    return (
        type(end),
        str(end.__cause__) if isinstance(end, Exception) else "",
        numbers,
        clock.sleeps,
        source.asked,
    )


@pytest.mark.req("CE-01", "CE-11", "CE-15")
@settings(max_examples=80, deadline=None)
@given(
    script=st.lists(st.sampled_from(["full", "empty", "error"]), max_size=7),
    attempts=st.integers(1, 3),
    streaming=st.booleans(),
)
def test_the_same_source_gives_the_same_fetches_sleeps_and_end_in_both_modes(
    script: list[str], attempts: int, streaming: bool
) -> None:
    assert fetched("threads", script, attempts, streaming) == fetched("asyncio", script, attempts, streaming)


# ── one public API ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-01")
@pytest.mark.parametrize(
    ("plain", "asynchronous"), [(ConsumerMixin, AsyncConsumerMixin), (ConsumerTask, AsyncConsumerTask)]
)
def test_both_modes_have_the_same_methods(plain: type, asynchronous: type) -> None:
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(plain) == public(asynchronous)
    assert {"process_transaction", "handle_transaction_success", "handle_transaction_exception"} <= public(
        plain
    )
