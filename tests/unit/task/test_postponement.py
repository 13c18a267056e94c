"""What happens to a transaction whose task raises `Postponed`, and to one that was already done."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from onceward import Transaction
from onceward.task.exceptions import ExceptionCategory, Postponed
from onceward.task.work import DUPLICATE, Outcome, OutcomeStatus
from onceward.testing.clock import FakeClock
from onceward.testing.telemetry import record
from onceward.transaction import Settlement, Verdict
from tests.support.world import (
    ListSource,
    SettlingSource,
    World,
    consuming,
    results,
    retry,
    system,
    transactions,
)

pytestmark = pytest.mark.timeout(60)


class ComeLater(Postponed):
    """A subclass with its own constructor."""

    def __init__(self) -> None:
        super().__init__("the shop is closed", delay=3.0)


def test_a_postponed_transaction_goes_back_with_its_delay(world: World) -> None:
    source = SettlingSource(transactions(1))
    task = world.consumer(results(Postponed("later", delay=7.0)), source=source)
    report = world.consume(task)
    assert source.reported == [Settlement(source.reported[0].transaction, Verdict.RETURNED, None, 7.0)]
    assert (report.postponed, report.processed, report.retries) == (1, 0, 0)


def test_no_handler_is_called_for_what_is_postponed(world: World) -> None:
    task = world.consumer(
        results(ComeLater()),
        success=lambda *_: None,
        exception=lambda *_: None,
        source=SettlingSource(transactions(1)),
    )
    world.consume(task, consuming(process=retry(attempts=3)))
    assert world.calls == [("process", "t0")]


def test_a_postponement_after_a_failed_attempt_is_one_still(world: World) -> None:
    source = SettlingSource(transactions(1))
    task = world.consumer(results(system(), Postponed("later", delay=2.0)), source=source)
    report = world.consume(task, consuming(process=retry(attempts=3)))
    assert [reported.delay for reported in source.reported] == [2.0]
    assert (report.postponed, report.retries) == (1, 1)


def test_where_nobody_takes_it_back_it_waits_in_its_slot_and_spends_no_attempt(world: World) -> None:
    clock = FakeClock()
    task = world.consumer(
        results(Postponed("later", delay=5.0), Postponed("later", delay=6.0), "done"),
        source=ListSource(transactions(1)),
        clock=clock,
    )
    report = world.consume(task, consuming(process=retry(attempts=1)))
    assert (report.succeeded, report.postponed, report.retries) == (1, 0, 0)
    assert clock.sleeps == [5.0, 6.0]


def test_what_waits_in_its_slot_keeps_to_the_time_of_its_lifecycle(world: World) -> None:
    task = world.consumer(results(Postponed("later", delay=30.0)), source=ListSource(transactions(1)))
    report = world.consume(task, consuming(transaction_timeout=0.05))
    assert report.failed_by_category[ExceptionCategory.TIMEOUT] == 1


def test_a_postponement_in_a_handler_is_a_failure_of_that_handler(world: World) -> None:
    source = SettlingSource(transactions(1))
    task = world.consumer(lambda _: None, success=results(Postponed("later")), source=source)
    report = world.consume(task)
    assert (report.failed, report.postponed) == (1, 0)
    assert source.verdicts() == {"t0": Verdict.FAILED}


def test_an_outcome_says_that_it_is_postponed_and_for_how_long(world: World) -> None:
    task = world.consumer(results(Postponed("later", delay=4.0)), source=SettlingSource())
    outcome = world.run(task.start_processing, Transaction(id="t0"))
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.delay, outcome.error) == (OutcomeStatus.POSTPONED, 4.0, None)


def test_what_had_been_done_before_is_a_success_and_a_duplicate(world: World) -> None:
    source = SettlingSource(transactions(2))
    task = world.consumer(
        lambda each: DUPLICATE if each.id == "t0" else "new", success=lambda *_: None, source=source
    )
    report = world.consume(task)
    assert (report.succeeded, report.duplicates) == (2, 1)
    assert source.verdicts() == {"t0": Verdict.DONE, "t1": Verdict.DONE}
    assert world.steps_of("t0") == ["process"]
    assert world.steps_of("t1") == ["process", "success"]


def test_a_duplicate_is_one_also_without_a_success_handler(world: World) -> None:
    task = world.consumer(results(DUPLICATE), source=SettlingSource())
    outcome = world.run(task.start_processing, Transaction(id="t0"))
    assert (outcome.status, outcome.duplicate, outcome.result) == (OutcomeStatus.SUCCEEDED, True, None)


def test_spans_show_postponement_and_duplicates_as_no_errors(world: World) -> None:
    task = world.consumer(
        lambda each: Postponed("later") if each.id == "t0" else DUPLICATE,
        source=SettlingSource(transactions(2)),
    )
    with record() as recording:
        world.consume(task)
    assert not [span.name for span in recording.spans() if not (span.status.is_ok or span.status.is_unset)]
    lives: dict[Any, Any] = {
        (span.attributes or {})["transaction_id"]: span.attributes
        for span in recording.spans("start_processing")
    }
    assert lives["t0"]["outcome"] == "postponed"
    assert (lives["t1"]["outcome"], lives["t1"]["duplicate"]) == ("succeeded", True)


@pytest.mark.parametrize(
    ("delay", "kept"), [(None, 1.0), ("soon", 1.0), (-5, 0.1), (float("nan"), 0.1), (1e9, 86400.0)]
)
def test_a_delay_that_was_changed_into_nonsense_does_not_end_the_loop(
    world: World, delay: Any, kept: float
) -> None:
    later = Postponed("not yet")
    later.delay = delay
    source = SettlingSource(transactions(1))
    assert world.consume(world.consumer(results(later), source=source)).postponed == 1
    assert [each.delay for each in source.reported] == [kept]


@pytest.mark.parametrize("delay", [-1.0, float("inf"), float("nan"), 86401.0])
def test_a_delay_that_makes_no_sense_is_refused_where_it_is_said(delay: float) -> None:
    with pytest.raises(ValueError, match="delay must be"):
        Postponed("later", delay=delay)


def test_a_postponement_pickles_with_its_delay() -> None:
    again = pickle.loads(pickle.dumps(Postponed("later", delay=9.0)))
    assert (str(again), again.delay) == ("later", 9.0)
