"""What a run needs from the engine: cutting off work in flight, and seeing what is stuck."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from onceward.task.report import StopReason
from onceward.task.settings import EngineSettings
from tests.support.wait import until
from tests.support.world import After, Deaf, SettlingSource, Until, World, consuming, retry, transactions

pytestmark = pytest.mark.timeout(60)


def beside(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "limit", [{"process": retry(3, timeout=60.0)}, {"timeout": 600.0}], ids=["step", "loop"]
)
def test_hurry_cuts_off_what_is_in_flight_and_what_has_ended_is_settled(
    world: World, limit: dict[str, Any]
) -> None:
    def process(transaction: Any) -> Any:
        return Until(lambda: False, limit=50.0) if transaction.id == "t1" else "done"

    source = SettlingSource(transactions(3))
    task = world.consumer(process, source=source)

    def hurry() -> None:
        until(lambda: ("process", "t1") in world.calls)
        task.stop()
        task.hurry()

    began = time.monotonic()
    thread = beside(hurry)
    report = world.consume(task, consuming(concurrency=3, **limit))
    thread.join()
    assert time.monotonic() - began < 40
    assert report.stop_reason is StopReason.STOPPED
    assert (report.abandoned, report.failed, report.retries) == (1, 0, 0)
    assert "t1" not in source.verdicts(), "left to its lease"
    assert report.succeeded + report.unstarted == 2
    assert set(source.verdicts()) == {"t0", "t2"}


def test_hurry_and_stuck_say_nothing_where_nothing_runs(world: World) -> None:
    task = world.consumer(lambda _: "done", source=SettlingSource(transactions(1)))
    task.hurry()
    assert task.stuck == 0
    assert world.consume(task).succeeded == 1
    assert task.stuck == 0


def test_a_task_says_how_many_of_its_attempts_are_stuck_now(world: World) -> None:
    let_go = threading.Event()
    seen: list[int] = []
    task = world.consumer(
        lambda transaction: Deaf(let_go) if transaction.id == "t0" else After(0),
        source=SettlingSource(transactions(1)),
        settings=EngineSettings(stuck_grace=0.05),
    )

    def look() -> None:
        until(lambda: task.stuck == 1)
        seen.append(task.stuck)
        let_go.set()
        until(lambda: task.stuck == 0)
        task.stop()

    thread = beside(look)
    report = world.consume(task, consuming(streaming=True, process=retry(timeout=0.2)))
    thread.join()
    assert seen == [1]
    assert report.stuck == 1
