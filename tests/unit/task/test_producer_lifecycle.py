"""The life of one outgoing transaction: produce, then exactly one of the two handlers."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward import AsyncProducerTask, ProducerTask, Transaction, cancel_requested
from onceward.task.exceptions import (
    ExceptionCategory,
    LoopError,
    ProducerLoopTimeoutException,
    TransactionException,
)
from onceward.task.mixins.policies import ProducerPolicy
from onceward.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from onceward.task.report import StopReason
from onceward.task.work import OutcomeStatus
from onceward.testing.clock import FakeClock
from tests.support.wait import until
from tests.support.world import (
    SHORT,
    Until,
    World,
    business,
    producing,
    results,
    retry,
    system,
    timeout,
    transactions,
)

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory
FOREVER = Until(lambda: False)
ONE = Transaction(id="t0", payload="p")


def outcome(world: World, task: Any, policy: ProducerPolicy | None = None) -> Any:
    return world.run(task.start_producing, ONE, policy)


# ── one semantics, two modes ────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-01")
def test_a_producer_task_of_either_mode_is_its_mixin() -> None:
    assert issubclass(ProducerTask, ProducerMixin)
    assert issubclass(AsyncProducerTask, AsyncProducerMixin)


@pytest.mark.req("PE-01")
@pytest.mark.parametrize("cls", [ProducerMixin, AsyncProducerMixin])
def test_both_producer_mixins_have_the_same_public_methods(cls: type) -> None:
    public = {name for name in dir(cls) if not name.startswith("_")}
    assert public >= {
        "produce_transactions",
        "start_producing",
        "produce_transaction",
        "handle_produce_success",
        "handle_produce_exception",
        "stop",
    }
    assert public == {name for name in dir(ProducerMixin) if not name.startswith("_")}


ANSWERS = {
    "ok": lambda: "sent",
    "business": business,
    "system": system,
    "timeout": timeout,
    "raw": lambda: OSError("no route"),
}
CATEGORIES = {"business": BUSINESS, "system": SYSTEM, "timeout": TIMEOUT, "raw": SYSTEM}
BACKOFFS = {"produce": 1.0, "success": 100.0, "exception": 10_000.0}

answers = st.lists(st.sampled_from(sorted(ANSWERS)), min_size=1, max_size=4)
lives = st.fixed_dictionaries({"produce": answers, "success": answers, "exception": answers})
attempts = st.fixed_dictionaries({step: st.integers(1, 3) for step in BACKOFFS})


class Model:
    """RFC-005 in twenty lines: the calls, the sleeps, and the outcome."""

    def __init__(self, script: dict[str, list[str]], attempts: dict[str, int]) -> None:
        self.calls: list[str] = []
        self.sleeps: list[float] = []
        self.script, self.attempts = script, attempts
        error = self.step("produce")
        if error is None:
            error = self.step("success")
        if error is not None:
            error = self.step("exception") or error
        self.category = error

    def step(self, name: str) -> ExceptionCategory | None:
        for attempt in range(self.attempts[name]):
            answer = answer_of(self.script[name], attempt)
            self.calls.append(name)
            if answer == "ok":
                return None
            category = CATEGORIES[answer]
            if name == "success":
                category = SYSTEM
            if category is BUSINESS:
                break
            if attempt + 1 < self.attempts[name]:
                self.sleeps.append(BACKOFFS[name] * 2.0**attempt)
        return category


def answer_of(script: list[str], attempt: int) -> str:
    return script[min(attempt, len(script) - 1)]


def played(world: World, script: dict[str, list[str]], step: str) -> Any:
    def play(*_: Any) -> Any:
        return ANSWERS[answer_of(script[step], world.steps_of("t0").count(step) - 1)]()

    return play


@pytest.mark.req("PE-01", "PE-02", "PE-03", "PE-04", "PE-05", "PE-07", "PE-08", "PE-14", "PE-17")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
@settings(max_examples=200, deadline=None)
@given(script=lives, attempts=attempts)
def test_any_script_of_results_gives_the_calls_sleeps_and_end_of_the_model(
    mode: str, script: dict[str, list[str]], attempts: dict[str, int]
) -> None:
    world, clock = World(mode), FakeClock()
    task = world.producer(
        played(world, script, "produce"),
        success=played(world, script, "success"),
        exception=played(world, script, "exception"),
        clock=clock,
    )
    policy = producing(**{step: retry(attempts[step], backoff=BACKOFFS[step]) for step in BACKOFFS})
    report = world.produce(task, [ONE], policy)
    model = Model(script, attempts)
    assert world.steps_of("t0") == model.calls
    assert clock.sleeps == model.sleeps
    assert report.retries == sum(first == second for first, second in pairwise(model.calls))
    assert (report.succeeded, report.failed) == ((1, 0) if model.category is None else (0, 1))
    assert {c for c, count in report.failed_by_category.items() if count} == {model.category} - {None}


# ── the path ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-02")
def test_a_success_is_produced_and_then_reported_to_the_success_handler(world: World) -> None:
    task = world.producer(success=lambda *_: None, exception=lambda *_: None)
    report = world.produce(task, [ONE])
    assert world.calls == [("produce", "t0"), ("success", "t0")]
    assert report.stop_reason is StopReason.DONE


@pytest.mark.req("PE-02")
def test_a_failure_is_produced_and_then_reported_to_the_exception_handler(world: World) -> None:
    task = world.producer(results(business()), success=lambda *_: None, exception=lambda *_: None)
    world.produce(task, [ONE])
    assert world.calls == [("produce", "t0"), ("exception", "t0")]


class NeverFetched:
    def fetch_transactions(self, size: int) -> list[Transaction]:
        raise AssertionError("a producer does not fetch")

    async def fetch_transactions_async(self, size: int) -> list[Transaction]:
        raise AssertionError("a producer does not fetch")


@pytest.mark.req("PE-02")
def test_a_producer_fetches_nothing_from_its_connectors(world: World) -> None:
    task = world.producer(connectors={"source": NeverFetched()})
    report = world.produce(task, transactions(3))
    assert (report.succeeded, report.fetches, report.empty_fetches) == (3, 0, 0)


@pytest.mark.req("PE-02")
def test_the_lifecycle_of_one_transaction_returns_its_outcome(world: World) -> None:
    ended = outcome(world, world.producer(lambda transaction: transaction.payload + "!"))
    assert ended.transaction is ONE
    assert (ended.status, ended.result, ended.error) == (OutcomeStatus.SUCCEEDED, "p!", None)


@pytest.mark.req("PE-02")
def test_the_outcome_of_a_failure_names_step_and_last_attempt(world: World) -> None:
    ended = outcome(world, world.producer(results(system())), producing(produce=retry(3)))
    assert (ended.status, ended.result, ended.step, ended.attempt) == (
        OutcomeStatus.FAILED,
        None,
        "produce",
        2,
    )


@pytest.mark.req("PE-13")
def test_one_transaction_under_a_limit_of_zero_is_not_started_and_says_so(world: World) -> None:
    with pytest.raises(LoopError, match="t0 was not started"):
        outcome(world, world.producer(), producing(limit=0))
    assert world.calls == []


@pytest.mark.req("PE-12")
def test_one_transaction_obeys_the_loop_timeout(world: World) -> None:
    task = world.producer(lambda _: FOREVER)
    with pytest.raises(ProducerLoopTimeoutException):
        outcome(world, task, producing(timeout=0.1))


def test_one_transaction_after_a_stop_is_not_started_and_says_so(world: World) -> None:
    task = world.producer()
    task.stop()
    with pytest.raises(LoopError, match="t0 was not started"):
        outcome(world, task)
    assert world.calls == []


# ── success ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-03")
@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, ..., object(), ("a",), NotImplemented])
def test_whatever_produce_returns_reaches_the_success_handler(world: World, value: Any) -> None:
    got: list[Any] = []
    task = world.producer(
        lambda _: value, success=lambda transaction, result: got.append((transaction, result))
    )
    report = world.produce(task, [ONE])
    [(transaction, result)] = got
    assert transaction is ONE
    assert result is value
    assert report.succeeded == 1


@pytest.mark.req("PE-03")
def test_a_task_without_a_success_handler_succeeds(world: World) -> None:
    assert world.produce(world.producer(lambda _: None), transactions(2)).succeeded == 2


@pytest.mark.req("PE-07")
@pytest.mark.parametrize("error", [business(), system(), timeout(), ValueError("x")])
def test_whatever_the_success_handler_raises_is_retried_within_its_own_policy(
    world: World, error: Exception
) -> None:
    task = world.producer(success=results(error, error, None), exception=lambda *_: None)
    report = world.produce(task, [ONE], producing(success=retry(3)))
    assert world.steps_of("t0") == ["produce", "success", "success", "success"]
    assert (report.succeeded, report.retries) == (1, 2)


@pytest.mark.req("PE-07")
def test_business_from_the_success_handler_reaches_the_exception_handler_as_system(world: World) -> None:
    refusal = business("too late")
    task = world.producer(success=results(refusal), exception=lambda *_: None)
    report = world.produce(task, [ONE], producing(success=retry(2), produce=retry(5)))
    assert world.steps_of("t0") == ["produce", "success", "success", "exception"]
    [(_, error)] = world.errors
    assert error.category is SYSTEM
    assert error.cause is refusal
    assert error.message == "too late"
    assert report.failed_by_category == {BUSINESS: 0, SYSTEM: 1, TIMEOUT: 0}


@pytest.mark.req("PE-07")
@pytest.mark.parametrize("error", [business(), system(), timeout(), ValueError("x")])
def test_whatever_the_success_handler_raises_is_a_system_failure(world: World, error: Exception) -> None:
    task = world.producer(success=results(error), exception=lambda *_: None)
    assert outcome(world, task).error.category is SYSTEM


@pytest.mark.req("PE-07")
def test_an_exhausted_success_handler_does_not_produce_again(world: World) -> None:
    task = world.producer(success=results(ValueError()), exception=lambda *_: None)
    world.produce(task, [ONE], producing(produce=retry(9), success=retry(2), exception=retry(9)))
    assert world.steps_of("t0") == ["produce", "success", "success", "exception"]


@pytest.mark.req("PE-07")
def test_every_attempt_of_the_success_handler_gets_the_same_result(world: World) -> None:
    value, got = object(), []
    play = results(ValueError(), None)

    def success(_: Transaction, result: Any) -> Any:
        got.append(result)
        return play()

    world.produce(world.producer(lambda _: value, success=success), [ONE], producing(success=retry(2)))
    assert len(got) == 2
    assert all(each is value for each in got)


# ── failure ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-04")
def test_business_from_produce_is_not_retried(world: World) -> None:
    task = world.producer(results(business()), success=lambda *_: None, exception=lambda *_: None)
    report = world.produce(task, [ONE], producing(produce=retry(5)))
    assert world.steps_of("t0") == ["produce", "exception"]
    assert report.failed_by_category == {BUSINESS: 1, SYSTEM: 0, TIMEOUT: 0}
    assert report.retries == 0


@pytest.mark.req("PE-04")
def test_business_after_a_retryable_failure_ends_the_retries(world: World) -> None:
    task = world.producer(results(system(), business()), exception=lambda *_: None)
    world.produce(task, [ONE], producing(produce=retry(5)))
    assert world.steps_of("t0") == ["produce", "produce", "exception"]


@pytest.mark.req("PE-04")
def test_the_exception_handler_gets_the_very_refusal_that_was_raised(world: World) -> None:
    refusal, got = business(), []
    task = world.producer(results(refusal), exception=lambda *given: got.append(given))
    world.produce(task, [ONE])
    [(transaction, error)] = got
    assert transaction is ONE
    assert error is refusal
    assert error.transaction_id == "t0"


@pytest.mark.req("PE-05")
@pytest.mark.parametrize("error", [system(), timeout(), ValueError("x"), TimeoutError("raw")])
def test_system_timeout_and_other_errors_are_retried_until_one_attempt_returns(
    world: World, error: Exception
) -> None:
    task = world.producer(results(error, error, "sent"), success=lambda *_: None, exception=lambda *_: None)
    report = world.produce(task, [ONE], producing(produce=retry(3)))
    assert world.steps_of("t0") == ["produce", "produce", "produce", "success"]
    assert (report.succeeded, report.retries) == (1, 2)


@pytest.mark.req("PE-05")
@pytest.mark.parametrize(
    ("error", "category"),
    [(system(), SYSTEM), (timeout(), TIMEOUT), (ValueError("x"), SYSTEM), (TimeoutError("raw"), SYSTEM)],
)
def test_an_exhausted_produce_fails_with_the_category_of_its_last_error(
    world: World, error: Exception, category: ExceptionCategory
) -> None:
    task = world.producer(results(error), exception=lambda *_: None)
    report = world.produce(task, [ONE], producing(produce=retry(2)))
    assert world.steps_of("t0") == ["produce", "produce", "exception"]
    assert report.failed_by_category[category] == report.failed == 1


@pytest.mark.req("PE-05")
def test_retries_wait_for_backoff_times_multiplier_to_the_attempt_capped(world: World) -> None:
    clock = FakeClock()
    policy = producing(produce=retry(5, backoff=1.0, backoff_multiplier=3.0, backoff_cap=10.0))
    world.produce(world.producer(results(system()), clock=clock), [ONE], policy)
    assert clock.sleeps == [1.0, 3.0, 9.0, 10.0]


@pytest.mark.req("PE-05")
def test_the_engine_never_sleeps_for_less_than_no_time(world: World) -> None:
    clock = FakeClock()

    def late(_: Transaction) -> None:
        clock.advance(100.0)
        raise system()

    task = world.producer(late, clock=clock)
    world.produce(task, [ONE], producing(produce=retry(3, backoff=1.0), transaction_timeout=50.0))
    assert all(seconds >= 0 for seconds in clock.sleeps)


@pytest.mark.req("PE-08")
def test_the_exception_handler_is_retried_within_its_own_policy(world: World) -> None:
    task = world.producer(results(business("why")), exception=results(ValueError(), system(), None))
    ended = outcome(world, task, producing(produce=retry(9), exception=retry(3)))
    assert world.steps_of("t0") == ["produce", "exception", "exception", "exception"]
    assert (ended.status, ended.error.message) == (OutcomeStatus.FAILED, "why")


@pytest.mark.req("PE-08")
def test_every_attempt_of_the_exception_handler_gets_the_same_error(world: World) -> None:
    task = world.producer(results(ValueError("first")), exception=results(ValueError(), None))
    world.produce(task, [ONE], producing(exception=retry(2)))
    (_, first), (_, second) = world.errors
    assert first is second
    assert isinstance(first.cause, ValueError)


@pytest.mark.req("PE-08")
def test_an_exhausted_exception_handler_makes_its_last_error_the_outcome(world: World) -> None:
    task = world.producer(
        results(business()), success=lambda *_: None, exception=results(ValueError("first"), KeyError("last"))
    )
    ended = outcome(world, task, producing(exception=retry(2)))
    assert world.steps_of("t0") == ["produce", "exception", "exception"]
    assert (ended.status, ended.step, ended.error.category) == (OutcomeStatus.FAILED, "exception", SYSTEM)
    assert isinstance(ended.error.cause, KeyError)


@pytest.mark.req("PE-08")
def test_an_exhausted_exception_handler_does_not_stop_the_loop(world: World) -> None:
    task = world.producer(results(business()), exception=results(ValueError()))
    report = world.produce(task, transactions(5), producing(batch=2))
    assert (report.failed, report.stop_reason) == (5, StopReason.DONE)


@pytest.mark.req("PE-17")
@pytest.mark.parametrize(
    ("produce", "success", "policy"),
    [
        (results(business()), None, producing(produce=retry(3))),
        (results(system()), None, producing(produce=retry(3))),
        (results(None), results(ValueError()), producing(success=retry(3))),
        (lambda _: FOREVER, None, producing(transaction_timeout=0.1)),
        (results(None), lambda *_: FOREVER, producing(transaction_timeout=0.1)),
        (results(system()), None, producing(produce=retry(2, backoff=60.0), transaction_timeout=0.1)),
    ],
    ids=[
        "business",
        "exhausted",
        "success exhausted",
        "out of time",
        "success out of time",
        "backoff out of time",
    ],
)
def test_the_exception_handler_is_entered_once_for_each_final_failure(
    world: World, produce: Any, success: Any, policy: ProducerPolicy
) -> None:
    task = world.producer(produce, success=success, exception=lambda *_: None)
    report = world.produce(task, [ONE], policy)
    assert [step for step, _ in world.calls].count("exception") == 1
    assert report.failed == 1


@pytest.mark.req("PE-17")
@pytest.mark.parametrize("error", [business(), system(), timeout(), ValueError()])
def test_the_success_handler_does_not_run_after_a_failed_produce(world: World, error: Exception) -> None:
    task = world.producer(results(error), success=lambda *_: None)
    world.produce(task, [ONE], producing(produce=retry(2)))
    assert "success" not in world.steps_of("t0")


@pytest.mark.req("PE-17")
def test_the_exception_handler_does_not_run_after_a_success(world: World) -> None:
    task = world.producer(success=lambda *_: None, exception=lambda *_: None)
    world.produce(task, transactions(3))
    assert [step for step, _ in world.calls].count("exception") == 0


@pytest.mark.req("PE-17", "PE-12")
def test_a_lifecycle_that_ends_in_its_exception_handler_does_not_enter_it_again(world: World) -> None:
    task = world.producer(results(business()), exception=lambda *_: FOREVER)
    ended = outcome(world, task, producing(exception=retry(3), transaction_timeout=SHORT))
    assert world.steps_of("t0") == ["produce", "exception"]
    assert (ended.status, ended.error.category) == (OutcomeStatus.FAILED, TIMEOUT)


# ── time limits of attempts ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("PE-06", "PE-05")
def test_a_produce_attempt_that_times_out_is_retried(world: World) -> None:
    task = world.producer(results(FOREVER, "sent"), success=lambda *_: None)
    report = world.produce(task, [ONE], producing(produce=retry(2, timeout=SHORT)))
    assert world.steps_of("t0") == ["produce", "produce", "success"]
    assert (report.succeeded, report.timed_out, report.retries) == (1, 1, 1)


@pytest.mark.req("PE-06")
def test_a_produce_step_that_times_out_for_good_is_a_transaction_exception_of_category_timeout(
    world: World,
) -> None:
    task = world.producer(lambda _: FOREVER, exception=lambda *_: None)
    report = world.produce(task, [ONE], producing(produce=retry(2, timeout=0.1)))
    [(_, error)] = world.errors
    assert type(error) is TransactionException
    assert (error.category, error.transaction_id) == (TIMEOUT, "t0")
    assert (report.failed_by_category[TIMEOUT], report.timed_out) == (1, 2)


@pytest.mark.req("PE-06", "PE-07")
def test_a_success_handler_that_times_out_is_retried_and_then_reported_as_timeout(world: World) -> None:
    task = world.producer(success=lambda *_: FOREVER, exception=lambda *_: None)
    world.produce(task, [ONE], producing(success=retry(2, timeout=SHORT)))
    assert world.steps_of("t0") == ["produce", "success", "success", "exception"]
    [(_, error)] = world.errors
    assert (type(error), error.category) == (TransactionException, TIMEOUT)


@pytest.mark.req("PE-06", "PE-08")
def test_an_exception_handler_that_times_out_is_retried_and_then_the_outcome(world: World) -> None:
    task = world.producer(results(business()), exception=lambda *_: FOREVER)
    ended = outcome(world, task, producing(exception=retry(2, timeout=SHORT)))
    assert world.steps_of("t0") == ["produce", "exception", "exception"]
    assert (type(ended.error), ended.error.category) == (TransactionException, TIMEOUT)


@pytest.mark.req("PE-06")
def test_the_time_limit_is_of_one_attempt_and_not_of_their_sum(world: World) -> None:
    clock_began = time.monotonic()
    again = Until(lambda: time.monotonic() - clock_began > 0.5, value=None)

    def produce(_: Transaction) -> Any:
        nonlocal clock_began
        clock_began = time.monotonic()
        return again if world.steps_of("t0").count("produce") == 3 else Until(again.condition, system())

    report = world.produce(world.producer(produce), [ONE], producing(produce=retry(3, timeout=1.2)))
    assert (report.succeeded, report.timed_out) == (1, 0)


@pytest.mark.req("PE-06")
def test_what_a_timed_out_attempt_returns_after_all_is_discarded(world: World) -> None:
    got: list[Any] = []
    attempts: list[int] = []

    class Stubborn(ProducerTask):
        def produce_transaction(self, transaction: Transaction) -> str:
            attempts.append(len(attempts))
            if len(attempts) == 1:
                until(cancel_requested)
                return "late"
            return "in time"

        def handle_produce_success(self, transaction: Transaction, result: Any) -> None:
            got.append(result)

    class AsyncStubborn(AsyncProducerTask):
        async def produce_transaction(self, transaction: Transaction) -> str:
            attempts.append(len(attempts))
            try:
                while len(attempts) == 1:
                    await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                return "late"
            return "in time"

        async def handle_produce_success(self, transaction: Transaction, result: Any) -> None:
            got.append(result)

    task = (AsyncStubborn if world.asynchronous else Stubborn)(connectors={})
    report = world.produce(task, [ONE], producing(produce=retry(2, timeout=SHORT)))
    assert got == ["in time"]
    assert (report.succeeded, report.timed_out) == (1, 1)


@pytest.mark.req("PE-06")
def test_a_timed_out_attempt_has_ended_before_the_next_begins(world: World) -> None:
    running: list[int] = []
    together: list[int] = []

    class Slow(ProducerTask):
        def produce_transaction(self, transaction: Transaction) -> None:
            running.append(1)
            together.append(len(running))
            until(cancel_requested)
            time.sleep(0.05)
            running.pop()

    class AsyncSlow(AsyncProducerTask):
        async def produce_transaction(self, transaction: Transaction) -> None:
            running.append(1)
            together.append(len(running))
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                running.pop()

    task = (AsyncSlow if world.asynchronous else Slow)(connectors={})
    world.produce(task, [ONE], producing(produce=retry(3, timeout=SHORT)))
    assert together == [1, 1, 1]


# ── what handlers and callers get ───────────────────────────────────────────────────────────────────────


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Bare(TransactionException):
    """A subclass that forgets to call its base."""

    def __init__(self, number: int) -> None:
        self.number = number


RAW = {
    "ValueError": ValueError("x"),
    "empty": ValueError(),
    "KeyError": KeyError("x"),
    "TimeoutError": TimeoutError(),
    "CancelledError": asyncio.CancelledError(),
    "ExceptionGroup": ExceptionGroup("many", [ValueError("a"), OSError("b")]),
    "RecursionError": RecursionError(),
    "StopAsyncIteration": StopAsyncIteration(),
    "without words": Mute(),
}


@pytest.mark.req("PE-14")
@pytest.mark.parametrize("error", RAW.values(), ids=RAW.keys())
@pytest.mark.parametrize("step", ["produce", "success", "exception"])
def test_an_error_of_any_kind_from_any_step_becomes_a_system_failure_with_its_cause(
    world: World, step: str, error: BaseException
) -> None:
    task = world.producer(
        results({"produce": error, "exception": business()}.get(step)),
        success=results(error if step == "success" else None),
        exception=results(error if step == "exception" else None),
    )
    ended = outcome(world, task)
    assert type(ended.error) is TransactionException
    assert ended.error.category is SYSTEM
    assert ended.error.cause is error
    assert ended.error.transaction_id == "t0"


@pytest.mark.req("PE-14")
def test_a_stop_iteration_from_user_code_is_a_failure_like_any_other(world: World) -> None:
    task = world.producer(results(StopIteration("x")), exception=lambda *_: None)
    report = world.produce(task, transactions(3))
    assert (report.failed_by_category[SYSTEM], report.stop_reason) == (3, StopReason.DONE)


@pytest.mark.req("PE-14")
def test_a_transaction_exception_that_forgot_its_base_is_a_system_failure(world: World) -> None:
    report = world.produce(world.producer(results(Bare(7))), transactions(2))
    assert (report.failed_by_category[SYSTEM], report.stop_reason) == (2, StopReason.DONE)


@pytest.mark.req("PE-14")
def test_a_subclass_of_transaction_exception_reaches_the_handler_as_it_is(world: World) -> None:
    class CardExpired(TransactionException):
        def __init__(self) -> None:
            super().__init__("expired", category=BUSINESS)

    task = world.producer(results(CardExpired()), exception=lambda *_: None)
    world.produce(task, [ONE], producing(produce=retry(3)))
    [(_, error)] = world.errors
    assert isinstance(error, CardExpired)


@pytest.mark.req("PE-14")
def test_an_error_object_raised_for_two_transactions_names_each_of_them(world: World) -> None:
    task = world.producer(results(business()), exception=lambda *_: None)
    world.produce(task, transactions(2))
    assert [(id, error.transaction_id) for id, error in world.errors] == [("t0", "t0"), ("t1", "t1")]


@pytest.mark.req("PE-14")
def test_a_loop_in_which_every_transaction_fails_raises_nothing(world: World) -> None:
    report = world.produce(world.producer(results(OSError())), transactions(4))
    assert (report.processed, report.failed, report.stop_reason) == (4, 4, StopReason.DONE)


@pytest.mark.req("PE-14")
@pytest.mark.parametrize("exit", [SystemExit(3), KeyboardInterrupt("now")])
def test_an_exit_raised_by_user_code_is_no_outcome_and_goes_through_to_the_caller(
    world: World, exit: BaseException
) -> None:
    task = world.producer(results(exit), success=lambda *_: None, exception=lambda *_: None)
    with pytest.raises(type(exit)) as raised:
        world.produce(task, transactions(3))
    assert raised.value is exit
    assert world.steps_of("t0") == ["produce"]


@pytest.mark.req("PE-14")
def test_nothing_is_started_after_user_code_raised_an_exit(world: World) -> None:
    with pytest.raises(SystemExit):
        world.produce(world.producer(results(SystemExit(3))), transactions(5))
    assert world.calls == [("produce", "t0")]
