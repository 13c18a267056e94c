"""What waits in its slot, for a backoff or because it is postponed, does not hold a call that is ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from onceward.task.exceptions import FetchException, Postponed
from onceward.task.report import Report, StopReason
from tests.support.wait import until
from tests.support.world import (
    ListSource,
    SettlingSource,
    Until,
    World,
    business,
    consuming,
    producing,
    results,
    retry,
    system,
    transactions,
    within,
)

pytestmark = pytest.mark.timeout(120)

LONG = 3600.0
ROLES = pytest.mark.parametrize("role", ["consumer", "settling", "producer"])
LATER = Postponed("later", delay=LONG)


def run(
    world: World, role: str, main: Any, then: Callable[[Any], None], begun: int = 1, **more: Any
) -> tuple[Report, Any]:
    """Make a call, do this to its task once `begun` attempts have begun, and return the report and the source."""
    limit = more.pop("limit", None)
    handlers = {}
    for name, (handler, policy) in more.pop("handlers", {}).items():
        handlers[name], more[name] = handler, policy
    given = transactions(more.pop("count", 1))
    source: Any = SettlingSource(given) if role == "settling" else ListSource(given)
    if role == "producer":
        task = world.producer(main, **handlers)
        call = lambda: world.produce(task, given, producing(produce=limit, **more))  # noqa: E731
    else:
        task = world.consumer(main, **handlers, source=source)
        call = lambda: world.consume(task, consuming(process=limit, **more))  # noqa: E731

    def act() -> None:
        until(lambda: len(world.calls) >= begun)
        time.sleep(0.02)  # it should be waiting now; the test holds if it is not
        then(task)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    report = within(40, call)
    thread.join()
    return report, source


def stop(task: Any) -> None:
    task.stop()


def hurry(task: Any) -> None:
    task.hurry()


def stop_and_hurry(task: Any) -> None:
    task.stop()
    task.hurry()


HURRIES = pytest.mark.parametrize("end", [hurry, stop_and_hurry])
LIMITED = pytest.mark.parametrize("timeout", [None, LONG], ids=["unlimited", "limited"])


# ── a backoff ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-36")
@ROLES
@HURRIES
@LIMITED
def test_a_backoff_ends_at_once_when_the_call_is_hurried(
    world: World, role: str, end: Any, timeout: float | None
) -> None:
    report, source = run(world, role, results(system()), end, limit=retry(9, backoff=LONG, timeout=timeout))
    assert len(world.calls) == 1
    assert (report.abandoned, report.failed, report.stop_reason) == (1, 0, StopReason.STOPPED)
    if role == "settling":
        assert source.reported == []


@pytest.mark.req("CE-36")
@ROLES
@pytest.mark.parametrize("step", ["success", "exception"])
def test_the_backoff_of_a_handler_ends_too(world: World, role: str, step: str) -> None:
    main = results(business() if step == "exception" else "done")
    again = {step: (results(system()), retry(9, backoff=LONG))}
    report, _ = run(world, role, main, hurry, begun=2, handlers=again)
    assert len(world.calls) == 2
    assert report.abandoned == 1


@pytest.mark.req("CE-36")
@ROLES
def test_an_attempt_that_cannot_be_cut_off_is_the_last_one(world: World, role: str) -> None:
    hurried = threading.Event()

    def end(task: Any) -> None:
        task.hurry()
        hurried.set()

    report, _ = run(
        world,
        role,
        lambda _: Until(hurried.is_set, system()),
        end,
        limit=retry(9),
        handlers={"exception": (lambda *_: None, retry())},
    )
    assert len(world.calls) == 1
    assert (report.abandoned, report.stop_reason) == (1, StopReason.STOPPED)


@pytest.mark.req("CE-36")
@ROLES
def test_an_attempt_that_succeeds_after_all_counts(world: World, role: str) -> None:
    hurried = threading.Event()

    def end(task: Any) -> None:
        task.hurry()
        hurried.set()

    report, _ = run(world, role, lambda _: Until(hurried.is_set, "done"), end)
    assert (report.succeeded, report.abandoned) == (1, 0)


@pytest.mark.req("CE-36")
@ROLES
def test_nothing_is_started_after_a_hurry(world: World, role: str) -> None:
    report, source = run(
        world, role, results(system()), hurry, limit=retry(9, backoff=LONG), count=6, concurrency=2, begun=2
    )
    assert len(world.calls) == 2
    assert (report.abandoned, report.unstarted) == (2, 4)
    if role == "settling":
        assert sorted(each.transaction.id for each in source.reported) == ["t2", "t3", "t4", "t5"]


@pytest.mark.req("CE-36")
def test_each_transaction_that_was_waiting_has_one_line(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run(
        world,
        "settling",
        results(system()),
        hurry,
        limit=retry(9, backoff=LONG),
        count=2,
        concurrency=2,
        begun=2,
    )
    lines = [line.getMessage() for line in caplog.records if "abandoned" in line.getMessage()]
    assert sorted(lines) == [
        f"process was cut off because the run is ending; transaction t{number} is abandoned"
        for number in range(2)
    ]


@pytest.mark.req("CE-36")
@ROLES
def test_stop_alone_lets_a_backoff_and_its_attempt_be(world: World, role: str) -> None:
    report, _ = run(world, role, results(system(), "done"), stop, limit=retry(2, backoff=0.2))
    assert (report.succeeded, report.retries) == (1, 1)


def test_a_call_after_a_hurry_runs_as_usual(world: World) -> None:
    task = world.consumer(source=ListSource(transactions(3)))
    task.hurry()
    assert world.consume(task).succeeded == 3


# ── a postponement ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-36")
@pytest.mark.parametrize("role", ["consumer", "producer"])
@pytest.mark.parametrize("end", [stop, hurry, stop_and_hurry])
def test_what_is_postponed_in_its_slot_does_not_hold_a_call_that_is_stopped(
    world: World, caplog: pytest.LogCaptureFixture, role: str, end: Any
) -> None:
    report, _ = run(world, role, results(LATER), end)
    assert len(world.calls) == 1
    assert (report.postponed, report.abandoned, report.failed) == (1, 0, 0)
    assert report.stop_reason is StopReason.STOPPED
    assert "transaction t0 is not done" in caplog.text


@pytest.mark.req("CE-36")
@pytest.mark.parametrize("role", ["consumer", "producer"])
def test_what_postpones_itself_after_a_stop_does_not_wait(world: World, role: str) -> None:
    stopped = threading.Event()

    def end(task: Any) -> None:
        task.stop()
        stopped.set()

    report, _ = run(world, role, lambda _: Until(stopped.is_set, LATER), end)
    assert report.postponed == 1


@pytest.mark.req("CE-12")
def test_it_does_not_hold_the_error_of_a_source_either(world: World) -> None:
    source = ListSource(script=[transactions(1), OSError("gone")])
    task = world.consumer(results(LATER), source=source)
    with pytest.raises(FetchException):
        within(40, world.consume, task, consuming(mode="continuous", concurrency=4))
    assert len(world.calls) == 1


@pytest.mark.req("CE-36")
def test_a_stop_while_only_postponed_work_is_left_is_obeyed(world: World) -> None:
    """The source is empty, so the loop is about to end, and waits only for that."""
    report, _ = run(world, "consumer", results(LATER), stop, mode="continuous", concurrency=4)
    assert report.postponed == 1


@pytest.mark.parametrize("role", ["consumer", "producer"])
def test_a_postponement_without_a_delay_does_not_spin(world: World, role: str) -> None:
    began = time.monotonic()

    def not_yet(_: Any) -> Any:
        return None if time.monotonic() - began > 0.5 else Postponed("not yet", delay=0)

    report, _ = run(world, role, not_yet, lambda _: None)
    assert report.succeeded == 1
    assert len(world.calls) < 20


def test_a_source_is_not_asked_again_at_once_either(world: World) -> None:
    source = SettlingSource(transactions(1))
    world.consume(world.consumer(results(Postponed("not yet", delay=0)), source=source))
    assert source.reported[0].delay > 0
