"""What operators see of work in flight: its step, and where the code of long or stuck work is."""

from __future__ import annotations

import json
import threading
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onceward.run.flights import Seen, flights_of
from onceward.task.settings import EngineSettings
from onceward.task.work import Life
from onceward.transaction import Transaction
from tests.support.run.world import Run, Site
from tests.support.wait import until
from tests.support.world import Deaf, SettlingSource, World, consuming, retry, transactions

pytestmark = [pytest.mark.timeout(120), pytest.mark.req("UI-18")]

SHOP = """
import time
from onceward import Limit, Onceward

app = Onceward("shop", database="sqlite:///shop.db")
POLICY = {"steps": {"process": {"retry": {"timeout": 1.0}}}}


@app.consumer("sqlite:///orders.db", limit=Limit(concurrency=1, by="customer"), policy=POLICY)
def charge(order: dict) -> None:
    wait_for_the_bank(order)


def wait_for_the_bank(order: dict) -> None:
    while True:
        time.sleep(0.05)
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP)
    return made


def test_an_attempt_has_its_step_and_the_place_of_its_code(world: World) -> None:
    let_go = threading.Event()
    seen: list[Any] = []

    def process(transaction: Any) -> Any:
        return Deaf(let_go)

    task = world.consumer(
        process, source=SettlingSource(transactions(1)), settings=EngineSettings(stuck_grace=0.05)
    )

    def look() -> None:
        until(task.attempts)
        seen.append((task.begun(), task.attempts()[0]))
        until(lambda: any(each.stuck for each in task.attempts()))
        seen.append(next(each for each in task.attempts() if each.stuck))
        seen.append(seen[-1].stack())
        let_go.set()
        until(lambda: task.stuck == 0)
        task.stop()

    thread = threading.Thread(target=look)
    thread.start()
    world.consume(task, consuming(streaming=True, process=retry(timeout=1.0)))
    thread.join()
    begun, first = seen[0]
    assert begun == {"t0": "process"}
    assert (first.transaction_id, first.step, first.number, first.stuck) == ("t0", "process", 0, False)
    assert (seen[1].transaction_id, seen[1].step, seen[1].stuck) == ("t0", "process", True)
    assert "tests/support/world.py" in seen[2], "the code that waits, not the engine around it"
    assert "onceward/task/" not in seen[2]
    assert (task.attempts(), task.begun()) == ([], {})


def test_a_transaction_can_be_looked_at_before_its_first_step(world: World) -> None:
    task = world.consumer(lambda transaction: None, source=SettlingSource([]))
    life = Life(Transaction("t0"), Any, copy_context(), lambda life, failed: None)  # type: ignore[arg-type]
    task._engine.ids.holders["t0"] = life  # as the loop does before a thread takes it
    assert task.begun() == {"t0": ""}


@pytest.mark.req("UI-29")
def test_what_runs_is_listed_before_what_waits_for_it() -> None:
    """The messages of a batch have the same age, and one that holds up the others is of most interest."""
    batch = [(Transaction(f"t{number}"), 0.0) for number in range(100)]
    running = SimpleNamespace(
        transaction_id="t99", step="process", number=0, stuck=False, stack=lambda: "charge()"
    )
    task = SimpleNamespace(attempts=lambda: [running], begun=dict)
    found = flights_of(SimpleNamespace(order=None, limit_keys=None), task, batch, now=60.0)  # type: ignore[arg-type]
    assert [each.id for each in found] == ["t99", *(f"t{number}" for number in range(9))]
    assert (found[0].attempt, found[0].stack) == (1, "charge()")


def test_the_age_of_an_attempt_is_not_that_of_its_message() -> None:
    """A message may have waited in its batch for long before its code began."""
    batch = [(Transaction("t0"), 0.0)]
    consumer: Any = SimpleNamespace(order=None, limit_keys=None)
    seen: Seen = {}

    def look(now: float, *numbers: int) -> float | None:
        running = [
            SimpleNamespace(transaction_id="t0", step="process", number=each, stuck=False, stack=lambda: "")
            for each in numbers
        ]
        task = SimpleNamespace(attempts=lambda: running, begun=lambda: {"t0": "process"})
        return flights_of(consumer, task, batch, now, seen)[0].attempt_since

    assert look(60.0, 0) == 60.0
    assert look(61.0, 0) == 60.0
    assert look(62.0) is None, "between two attempts"
    assert look(63.0, 1) == 63.0
    assert flights_of(consumer, None, batch, 64.0, seen) == []
    assert seen == {}, "nothing is kept of what is over"


def workers(run: Run) -> list[dict[str, Any]]:
    return list(json.loads(run.get("/progress")[1])["workers"])


def test_a_replaced_process_leaves_what_was_stuck_and_progress_has_neither_code_nor_payload(
    site: Site,
) -> None:
    site.send({"id": "a", "customer": "ann@example.com"})
    with site.run("--health", "127.0.0.1:0", ONCEWARD_ENGINE__STUCK_GRACE="1") as run:
        [flight] = until(
            lambda: [each for one in consumers(run) for each in one["flights"] if each["attempt"]]
        )
        assert (flight["step"], flight["attempt"]) == ("process", 1)
        [stuck] = until(lambda: [each for worker in workers(run) for each in worker["were_stuck"]])
        assert (stuck["consumer"], stuck["id"], stuck["step"]) == ("charge", flight["id"], "process")
        assert stuck["pid"] in run.workers()  # it may be stuck in the next process by now, too
        page = run.get("/progress")[1]
        assert "ann@example.com" not in page
        assert "wait_for_the_bank" not in page


def consumers(run: Run) -> list[dict[str, Any]]:
    return [each for worker in workers(run) for each in worker["consumers"]]
