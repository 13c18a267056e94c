"""The life of one incoming transaction: process, then exactly one of success and failure."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from onceward import Transaction, cancel_requested
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.task.report import StopReason
from onceward.task.work import Outcome, OutcomeStatus
from onceward.testing.clock import FakeClock
from tests.support.wait import until
from tests.support.world import (
    SHORT,
    Exactly,
    ListSource,
    World,
    business,
    consuming,
    results,
    retry,
    system,
    timeout,
    transactions,
)

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory
ONE = Transaction(id="t0", payload="p")

pytestmark = pytest.mark.timeout(60)


def outcome(world: World, task: Any, policy: ConsumerPolicy | None = None) -> Outcome:
    ended = world.run(task.start_processing, ONE, policy)
    assert isinstance(ended, Outcome)
    return ended


# ── process ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-02", "CE-03")
@pytest.mark.parametrize(
    "value", [None, 0, False, "", [], {}, b"", 0.0, "text", {"a": 1}, Exactly(ValueError("only a value"))]
)
def test_whatever_process_returns_is_success_and_reaches_the_success_handler(
    world: World, value: Any
) -> None:
    got: list[Any] = []
    task = world.consumer(
        lambda _: value, success=lambda _, result: got.append(result), exception=results(None)
    )
    ended = outcome(world, task)
    expected = value.value if isinstance(value, Exactly) else value
    assert got == [expected]
    assert ended.status is OutcomeStatus.SUCCEEDED
    assert ended.result == expected
    assert world.steps_of("t0") == ["process", "success"]


@pytest.mark.req("CE-03")
def test_a_success_handler_gets_the_very_object_that_process_returned(world: World) -> None:
    result, got = object(), []
    task = world.consumer(lambda _: result, success=lambda given, value: got.append((given, value)))
    outcome(world, task)
    assert got[0][0] is ONE
    assert got[0][1] is result


@pytest.mark.req("CE-02")
def test_a_task_without_handlers_succeeds_and_fails_all_the_same(world: World) -> None:
    task = world.consumer(
        lambda given: business() if given.id == "t1" else None, source=ListSource(transactions(3))
    )
    report = world.consume(task)
    assert (report.succeeded, report.failed) == (2, 1)


@pytest.mark.req("CE-04", "CE-09")
def test_business_goes_to_the_exception_handler_at_once(world: World) -> None:
    refused, clock = business("card expired"), FakeClock()
    task = world.consumer(lambda _: refused, success=results(None), exception=results(None), clock=clock)
    ended = outcome(world, task, consuming(process=retry(5, backoff=1)))
    assert world.steps_of("t0") == ["process", "exception"]
    assert clock.sleeps == []
    assert world.errors[0][1] is refused
    assert (ended.status, ended.error) == (OutcomeStatus.FAILED, refused)


@pytest.mark.req("CE-05")
@pytest.mark.parametrize("raised", [system(), timeout()], ids=["system", "timeout"])
def test_system_and_timeout_are_retried(world: World, raised: TransactionException) -> None:
    task = world.consumer(results(raised, raised, "done"), success=results(None))
    ended = outcome(world, task, consuming(process=retry(3)))
    assert world.steps_of("t0") == ["process", "process", "process", "success"]
    assert ended.result == "done"


@pytest.mark.req("CE-05", "CE-09")
@pytest.mark.parametrize("raised", [system(), timeout()], ids=["system", "timeout"])
def test_an_exhausted_process_step_fails_with_its_last_error(
    world: World, raised: TransactionException
) -> None:
    task = world.consumer(results(OSError("first"), raised), exception=results(None))
    ended = outcome(world, task, consuming(process=retry(2)))
    assert world.steps_of("t0") == ["process", "process", "exception"]
    assert ended.error is raised
    assert world.errors[0][1] is raised


@pytest.mark.req("CE-06")
def test_any_other_exception_becomes_system_with_its_cause_and_is_retried(world: World) -> None:
    raised = ValueError("no such thing")
    task = world.consumer(results(raised), exception=results(None))
    ended = outcome(world, task, consuming(process=retry(3)))
    assert world.steps_of("t0") == ["process"] * 3 + ["exception"]
    error = world.errors[0][1]
    assert error is ended.error
    assert isinstance(error, TransactionException)
    assert error.category is SYSTEM
    assert error.__cause__ is raised
    assert error.transaction_id == "t0"
    assert "no such thing" in str(error)


@pytest.mark.req("CE-06")
def test_an_unexpected_exception_that_passes_leaves_no_trace_in_the_outcome(world: World) -> None:
    task = world.consumer(results(KeyError("k"), "fine"), success=results(None), exception=results(None))
    ended = outcome(world, task, consuming(process=retry(2)))
    assert (ended.status, ended.result, ended.error) == (OutcomeStatus.SUCCEEDED, "fine", None)
    assert "exception" not in world.steps_of("t0")


@pytest.mark.req("CE-04")
def test_a_subclass_of_the_business_exception_is_business(world: World) -> None:
    class Refused(TransactionException):
        def __init__(self) -> None:
            super().__init__("refused", BUSINESS)

    task = world.consumer(lambda _: Refused(), exception=results(None))
    outcome(world, task, consuming(process=retry(3)))
    assert world.steps_of("t0") == ["process", "exception"]


# ── success handler ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-07", "CE-35")
def test_a_failing_success_handler_is_retried_without_running_process_again(world: World) -> None:
    task = world.consumer(results("r"), success=results(OSError(), system(), None), exception=results(None))
    ended = outcome(world, task, consuming(process=retry(9), success=retry(3)))
    assert world.steps_of("t0") == ["process", "success", "success", "success"]
    assert ended.status is OutcomeStatus.SUCCEEDED


@pytest.mark.req("CE-07", "CE-09")
def test_an_exhausted_success_handler_falls_to_the_exception_handler(world: World) -> None:
    raised = OSError("disk")
    task = world.consumer(results("r"), success=results(raised), exception=results(None))
    ended = outcome(world, task, consuming(process=retry(5), success=retry(2)))
    assert world.steps_of("t0") == ["process", "success", "success", "exception"]
    assert ended.status is OutcomeStatus.FAILED
    assert world.errors[0][1].__cause__ is raised
    assert ended.error is world.errors[0][1]


@pytest.mark.req("CE-04", "CE-07")
def test_business_in_a_success_handler_is_not_retried(world: World) -> None:
    task = world.consumer(results("r"), success=results(business()), exception=results(None))
    ended = outcome(world, task, consuming(success=retry(5)))
    assert world.steps_of("t0") == ["process", "success", "exception"]
    assert ended.error is not None
    assert ended.error.category is BUSINESS


@pytest.mark.req("CE-35")
def test_each_step_sleeps_by_its_own_policy(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(
        results(OSError(), "r"),
        success=results(OSError(), OSError(), OSError()),
        exception=results(OSError(), None),
        clock=clock,
    )
    policy = consuming(
        process=retry(2, backoff=1, backoff_multiplier=1),
        success=retry(3, backoff=10, backoff_multiplier=2),
        exception=retry(4, backoff=100, backoff_multiplier=1),
    )
    outcome(world, task, policy)
    assert clock.sleeps == [1, 10, 20, 100]


@pytest.mark.req("CE-35")
def test_process_failures_use_up_none_of_the_success_budget(world: World) -> None:
    task = world.consumer(
        results(OSError(), OSError(), "r"), success=results(OSError(), None), exception=results(None)
    )
    ended = outcome(world, task, consuming(process=retry(3), success=retry(2)))
    assert ended.status is OutcomeStatus.SUCCEEDED
    assert world.steps_of("t0") == ["process"] * 3 + ["success"] * 2


# ── exception handler ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-08")
def test_a_failing_exception_handler_is_retried_with_the_same_error(world: World) -> None:
    task = world.consumer(results(business()), exception=results(OSError(), OSError(), None))
    ended = outcome(world, task, consuming(exception=retry(3)))
    assert world.steps_of("t0") == ["process"] + ["exception"] * 3
    assert {id(error) for _, error in world.errors} == {id(ended.error)}
    assert ended.error is not None
    assert ended.error.category is BUSINESS


@pytest.mark.req("CE-08")
def test_the_last_error_of_an_exhausted_exception_handler_is_the_outcome(world: World) -> None:
    last = RuntimeError("the handler, too")
    task = world.consumer(results(business()), exception=results(OSError(), last))
    ended = outcome(world, task, consuming(exception=retry(2)))
    assert ended.status is OutcomeStatus.FAILED
    assert ended.error is not None
    assert ended.error.__cause__ is last
    assert ended.error.category is SYSTEM
    assert (ended.step, ended.attempt) == ("exception", 1)


@pytest.mark.req("CE-08")
def test_the_loop_goes_on_after_an_exhausted_exception_handler(world: World) -> None:
    task = world.consumer(
        lambda given: business() if given.id == "t0" else None,
        exception=results(OSError()),
        source=ListSource(transactions(3)),
    )
    report = world.consume(task, consuming(exception=retry(2)))
    assert (report.succeeded, report.failed) == (2, 1)
    assert report.failed_by_category == {BUSINESS: 0, SYSTEM: 1, TIMEOUT: 0}
    assert report.stop_reason is StopReason.EMPTY


@pytest.mark.req("CE-09")
@pytest.mark.parametrize(
    ("process", "success"),
    [
        (results(business()), results(None)),
        (results(OSError()), results(None)),
        (results("r"), results(OSError())),
        (results("r"), results(business())),
    ],
    ids=["business", "process exhausted", "success exhausted", "business in success"],
)
def test_the_exception_handler_is_entered_once_per_failed_transaction(
    world: World, process: Any, success: Any
) -> None:
    task = world.consumer(process, success=success, exception=results(None))
    outcome(world, task, consuming(process=retry(2), success=retry(2), exception=retry(3)))
    assert world.steps_of("t0").count("exception") == 1


@pytest.mark.req("CE-09", "CE-19")
def test_the_exception_handler_is_entered_once_after_a_lifecycle_timeout(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(results(OSError("x")), exception=results(None), clock=clock)
    policy = consuming(process=retry(100, backoff=4, backoff_multiplier=1), transaction_timeout=10)
    ended = outcome(world, task, policy)
    assert world.steps_of("t0") == ["process"] * 3 + ["exception"]
    assert ended.error is not None
    assert ended.error.category is TIMEOUT
    assert world.errors[0][1] is ended.error


@pytest.mark.req("CE-09", "CE-19")
def test_a_lifecycle_timeout_in_the_exception_handler_does_not_enter_it_again(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(results(business()), exception=results(OSError()), clock=clock)
    policy = consuming(exception=retry(100, backoff=4, backoff_multiplier=1), transaction_timeout=10)
    ended = outcome(world, task, policy)
    assert world.steps_of("t0") == ["process"] + ["exception"] * 3
    assert ended.error is not None
    assert ended.error.category is TIMEOUT


@pytest.mark.req("CE-09", "CE-19")
def test_after_a_lifecycle_timeout_the_exception_handler_has_its_whole_policy(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(results(OSError()), exception=results(OSError(), OSError(), None), clock=clock)
    policy = consuming(
        process=retry(100, backoff=6, backoff_multiplier=1),
        exception=retry(3, backoff=50, backoff_multiplier=1),
        transaction_timeout=10,
    )
    ended = outcome(world, task, policy)
    assert world.steps_of("t0") == ["process"] * 2 + ["exception"] * 3
    assert clock.sleeps == [6, 4, 50, 50]
    assert ended.status is OutcomeStatus.FAILED


# ── complete lives ──────────────────────────────────────────────────────────────────────────────────────

ENDS = [None, business(), OSError(), timeout()]


@pytest.mark.req("CE-02")
@pytest.mark.parametrize("process", ENDS, ids=repr)
@pytest.mark.parametrize("success", ENDS, ids=repr)
@pytest.mark.parametrize("exception", ENDS, ids=repr)
def test_a_life_takes_no_other_transition_and_has_one_outcome(
    world: World, process: Any, success: Any, exception: Any
) -> None:
    task = world.consumer(
        lambda _: process,
        success=lambda *_: success,
        exception=lambda *_: exception,
        source=ListSource([ONE]),
    )
    report = world.consume(task, consuming(process=retry(2), success=retry(2), exception=retry(2)))
    path = " ".join(world.steps_of("t0"))
    assert re.fullmatch(r"process( process)?( success( success)?)?( exception( exception)?)?", path)
    succeeded = process is None and success is None
    assert (report.succeeded, report.failed) == ((1, 0) if succeeded else (0, 1))
    assert ("exception" in path) is not succeeded
    assert report.processed == 1


@pytest.mark.req("CE-23")
def test_attempts_are_counted_from_zero_and_the_first_is_included(world: World) -> None:
    task = world.consumer(results(OSError()), exception=results(None))
    ended = outcome(world, task, consuming(process=retry(1)))
    assert world.steps_of("t0") == ["process", "exception"]
    assert (ended.step, ended.attempt) == ("exception", 0)


@pytest.mark.req("CE-23")
def test_an_outcome_names_the_step_and_attempt_it_came_from(world: World) -> None:
    task = world.consumer(results(OSError(), OSError(), "r"))
    ended = outcome(world, task, consuming(process=retry(5)))
    assert (ended.step, ended.attempt) == ("process", 2)


@pytest.mark.req("CE-37")
def test_a_policy_is_the_same_after_a_call_as_before(world: World) -> None:
    source = ListSource(transactions(3))
    source.fetch_transactions = _spoil(source.fetch_transactions)  # type: ignore[method-assign]
    source.fetch_transactions_async = _spoil(source.fetch_transactions_async)  # type: ignore[method-assign]
    policy = consuming(extra={"filter": {"kinds": ["a"]}}, process=retry(2))
    before = policy.model_copy(deep=True)
    world.consume(world.consumer(results(OSError(), None), source=source), policy)
    assert policy == before


def _spoil(fetch: Any) -> Any:
    def spoiling(size: int, **extra: Any) -> Any:
        extra["filter"]["kinds"].append("b")
        return fetch(size, **extra)

    return spoiling


# ── nothing is swallowed ────────────────────────────────────────────────────────────────────────────────


def engine_lines(caplog: pytest.LogCaptureFixture, text: str) -> list[tuple[str, str, int]]:
    return [
        (record.transaction_id, record.step, record.attempt)  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name.startswith("onceward") and text in record.getMessage()
    ]


@pytest.mark.req("CE-23", "CE-36")
def test_every_failed_attempt_has_a_log_line_with_transaction_step_and_attempt(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    task = world.consumer(
        results(OSError("p0"), "r"),
        success=results(OSError("s0"), OSError("s1")),
        exception=results(OSError("e0")),
    )
    outcome(world, task, consuming(process=retry(2), success=retry(2), exception=retry(1)))
    assert engine_lines(caplog, "p0") == [("t0", "process", 0)]
    assert engine_lines(caplog, "s0") == [("t0", "success", 0)]
    assert engine_lines(caplog, "s1") == [("t0", "success", 1)]
    assert engine_lines(caplog, "e0") == [("t0", "exception", 0)]


@pytest.mark.req("CE-36")
def test_a_business_refusal_has_a_log_line(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outcome(world, world.consumer(results(business("card expired"))))
    assert engine_lines(caplog, "card expired") == [("t0", "process", 0)]


@pytest.mark.req("CE-36")
def test_an_exit_from_a_handler_has_a_log_line(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    task = world.consumer(lambda _: SystemExit("closing time"))
    with pytest.raises(SystemExit):
        outcome(world, task)
    lines = [
        record
        for record in caplog.records
        if record.name.startswith("onceward") and record.transaction_id == "t0"  # type: ignore[attr-defined]
    ]
    assert [record.step for record in lines] == ["process"]  # type: ignore[attr-defined]


@pytest.mark.req("CE-36")
def test_what_an_interrupted_attempt_raises_is_the_cause_of_its_timeout(world: World) -> None:
    raised = OSError("could not roll back")
    if world.asynchronous:
        import asyncio

        async def process(_: Any, given: Transaction) -> None:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                raise raised from None
    else:

        def process(_: Any, given: Transaction) -> None:  # type: ignore[misc]
            until(cancel_requested)
            raise raised

    task = world.consumer()
    type(task).process_transaction = process
    ended = outcome(world, task, consuming(process=retry(1, timeout=SHORT)))
    assert ended.error is not None
    assert ended.error.category is TIMEOUT
    assert ended.error.__cause__ is raised


@pytest.mark.req("CE-02")
def test_stop_before_start_processing_is_answered_with_an_error_of_the_package(world: World) -> None:
    from onceward.errors import OncewardError

    task = world.consumer()
    task.stop()
    ends = world.run_together((task.start_processing, ONE))
    assert isinstance(ends[0], Outcome | OncewardError)
