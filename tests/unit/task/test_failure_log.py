"""Every failure has a log line; the traceback of the same failure appears only once in a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from onceward import Transaction
from onceward.task.exceptions import TransactionException
from onceward.telemetry.logger import AGAIN_AFTER, REMEMBERED, Tracebacks
from onceward.testing import FakeClock
from tests.support.world import (
    ListSource,
    SettlingSource,
    World,
    business,
    consuming,
    results,
    retry,
    transactions,
)


def gave_up(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [line for line in caplog.records if "gave up" in line.getMessage()]


def with_traceback(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The transactions whose line has a traceback."""
    return [vars(line)["transaction_id"] for line in gave_up(caplog) if line.exc_info]


def broken(transaction: Transaction) -> None:
    raise OSError(f"no answer to {transaction.id}")


def consume(world: World, doing: Callable[[Transaction], Any], count: int, **more: Any) -> None:
    task = world.consumer(doing, source=ListSource(transactions(count)), clock=more.pop("clock", None))
    world.consume(task, consuming(**more))


@pytest.mark.req("CE-36")
@pytest.mark.parametrize("concurrency", [1, 8])
def test_messages_that_fail_alike_have_a_line_each_and_one_traceback(
    world: World, caplog: pytest.LogCaptureFixture, concurrency: int
) -> None:
    consume(world, broken, 30, batch=30, concurrency=concurrency)
    lines = gave_up(caplog)
    assert {vars(line)["transaction_id"] for line in lines} == {f"t{number}" for number in range(30)}
    assert all("OSError: no answer to t" in line.getMessage() for line in lines)
    assert len(with_traceback(caplog)) == 1


def test_producers_show_a_traceback_once_too(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.produce(world.producer(broken), transactions(5))
    assert (len(gave_up(caplog)), with_traceback(caplog)) == (5, ["t0"])


def test_after_a_minute_the_traceback_is_shown_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()

    def process(transaction: Transaction) -> None:
        clock.advance(AGAIN_AFTER / 3)
        broken(transaction)

    consume(world, process, 7, clock=clock)
    assert with_traceback(caplog) == ["t0", "t3", "t6"]


def test_each_call_shows_it_for_itself(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        consume(world, broken, 2)
    assert with_traceback(caplog) == ["t0", "t0"]


def test_another_place_and_another_type_have_tracebacks_of_their_own(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def process(transaction: Transaction) -> None:
        if transaction.payload % 3 == 0:
            raise OSError("here")
        if transaction.payload % 3 == 1:
            raise OSError("there")
        int("no number")

    consume(world, process, 9)
    assert with_traceback(caplog) == ["t0", "t1", "t2"]


def test_what_led_to_a_failure_is_part_of_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def process(transaction: Transaction) -> None:
        try:
            {"a": int("1" if transaction.payload % 2 else "x")}["b"]
        except (KeyError, ValueError) as error:
            raise RuntimeError("cannot be read") from error

    consume(world, process, 4)
    assert with_traceback(caplog) == ["t0", "t1"]


def test_one_error_raised_again_and_again_is_one_failure(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    consume(world, results(OSError("the pool is closed")), 4)
    assert with_traceback(caplog) == ["t0"]


def test_a_task_that_says_itself_why_it_failed_has_no_traceback_as_before(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    consume(world, results(TransactionException("the bank is closed")), 2)
    assert (len(gave_up(caplog)), with_traceback(caplog)) == (2, [])


# ── the lines ───────────────────────────────────────────────────────────────────────────────────────────


def test_people_count_attempts_from_one_and_machines_from_zero(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    consume(world, broken, 1, process=retry(3))
    said = [
        (line.getMessage().partition(":")[0], vars(line)["attempt"])
        for line in caplog.records
        if line.name == "onceward.engine"
    ]
    assert said == [
        ("process failed (attempt 1 of 3), next in 0 s", 0),
        ("process failed (attempt 2 of 3), next in 0 s", 1),
        ("process gave up (attempt 3 of 3); its source takes no outcomes and does not learn of it", 2),
    ]


@pytest.mark.parametrize("step", ["process", "success", "exception"])
def test_whatever_step_gives_up_the_line_says_what_the_source_does_next(
    world: World, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    source = SettlingSource(transactions(1))
    fail = results(OSError("no answer"))
    match step:
        case "process":
            task = world.consumer(fail, source=source)
        case "success":
            task = world.consumer(success=fail, source=source)
        case _:
            task = world.consumer(broken, exception=fail, source=source)
    world.consume(task, consuming())
    assert f"{step} gave up (attempt 1 of 1); the source redelivers or dead-letters it: " in caplog.text


def test_a_producer_has_no_source_that_could_send_it_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.produce(world.producer(broken), transactions(1))
    assert "produce gave up (attempt 1 of 1): SYSTEM [t0]" in caplog.text


def test_a_source_that_fails_counts_from_one_too(world: World, caplog: pytest.LogCaptureFixture) -> None:
    source = ListSource(script=[OSError("no\nanswer"), []])
    world.consume(world.consumer(source=source), consuming(fetch=retry(5)))
    [line] = [line.getMessage() for line in caplog.records if line.name == "onceward.engine"]
    assert line == "fetch failed (attempt 1 of 5), next in 0 s: SYSTEM: OSError: no answer"


def test_a_failure_is_reported_in_one_line_however_long_its_text(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    consume(world, results(OSError("no table\n[SQL: SELECT 1]\n"), business("one\ntwo")), 2)
    said = [line.getMessage() for line in caplog.records if line.name == "onceward.engine"]
    assert said == [
        "process gave up (attempt 1 of 1); its source takes no outcomes and does not learn of it: SYSTEM [t0]: "
        "OSError: no table [SQL: SELECT 1]",
        "process refused: BUSINESS [t1]: one two",
    ]


def test_an_error_whose_text_cannot_be_shown_has_its_line(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Mute(TransactionException):
        def __str__(self) -> str:
            raise ValueError("no text")

    consume(world, results(Mute()), 1)
    [line] = gave_up(caplog)
    assert line.getMessage().endswith(": Mute")


# ── what is remembered ──────────────────────────────────────────────────────────────────────────────────


def raised(kind: type[BaseException] = OSError) -> BaseException:
    try:
        raise kind("broken")
    except BaseException as error:
        return error


def test_no_more_than_so_many_failures_are_remembered_and_the_oldest_is_forgotten() -> None:
    tracebacks = Tracebacks()
    kinds = [type(f"Error{number}", (Exception,), {}) for number in range(REMEMBERED + 1)]
    for kind in kinds:
        assert tracebacks.to_show(raised(kind), 0.0) is not None
    assert len(tracebacks._shown) == REMEMBERED
    assert tracebacks.to_show(raised(kinds[-1]), 1.0) is None
    assert tracebacks.to_show(raised(kinds[0]), 1.0) is not None


def test_members_of_a_group_tell_what_kind_of_failure_it_is() -> None:
    tracebacks = Tracebacks()

    def group(kind: type[Exception]) -> BaseException:
        return ExceptionGroup("unhandled errors in a TaskGroup", [kind("broken")])

    shown = [tracebacks.to_show(group(kind), 0.0) is not None for kind in (OSError, ValueError, OSError)]
    assert shown == [True, True, False]


def test_a_circular_chain_of_errors_is_a_kind_as_well() -> None:
    tracebacks = Tracebacks()
    one, other = raised(), raised(ValueError)
    one.__cause__, other.__cause__ = other, one
    assert tracebacks.to_show(one, 0.0) is one
    assert tracebacks.to_show(one, 0.0) is None


def test_an_error_that_was_never_raised_is_a_kind_as_well() -> None:
    tracebacks = Tracebacks()
    error = OSError("made and not raised")
    assert tracebacks.to_show(error, 0.0) is error
    assert tracebacks.to_show(error, 0.0) is None
    assert tracebacks.to_show(None, 0.0) is None
