"""Brief lives end as they do the general way, whatever their handlers do. See `onceward.task.attempts.brief_lives`."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from onceward import Postponed, Transaction
from onceward.task import slots
from onceward.task.cancellation import cancel_requested, current_token
from onceward.task.deadlines import Deadlines
from onceward.task.work import Life
from onceward.telemetry.context import current_work
from tests.support.wait import until
from tests.support.world import (
    After,
    SettlingSource,
    World,
    business,
    consuming,
    retry,
    system,
    transactions,
    within,
)

pytestmark = pytest.mark.timeout(60)

seen: ContextVar[str] = ContextVar("seen", default="nothing")


def returns(_: Transaction) -> str:
    return "a result"


def returns_nothing(_: Transaction) -> None:
    return None


def returns_later(_: Transaction) -> Any:
    return After(0.001, "late")


def refuses(transaction: Transaction) -> None:
    if transaction.id in ("t1", "t2"):
        raise business()


def breaks(transaction: Transaction) -> None:
    if transaction.id != "t2":
        raise system()


def stops_an_iteration(_: Transaction) -> None:
    raise StopIteration("not a result")


def postpones(_: Transaction) -> None:
    raise Postponed("not now", 7.0)


def cancels(_: Transaction) -> None:
    raise asyncio.CancelledError


def yields(_: Transaction) -> Any:
    return (number for number in range(3))


def leaves_coroutines(_: Transaction) -> Any:
    return [asyncio.sleep(0)]


def asks_for_its_token(_: Transaction) -> bool:
    return current_token() is not None and not cancel_requested()


def sets_a_variable(transaction: Transaction) -> None:
    if seen.get() != "nothing":
        raise business("it sees what another has set")
    seen.set(transaction.id)


HANDLERS = [
    returns,
    returns_nothing,
    returns_later,
    refuses,
    breaks,
    stops_an_iteration,
    postpones,
    cancels,
    yields,
    leaves_coroutines,
    asks_for_its_token,
    sets_a_variable,
]


def lived(world: World, handler: Any, interruptible: bool, attempts: int) -> Any:
    source = SettlingSource([*transactions(5), *transactions(2)])  # two ids come twice
    calls: list[tuple[str, Any, str | None]] = []

    def noting(transaction: Transaction) -> Any:
        work = current_work.get()
        calls.append((transaction.id, None if work is None else (work.task, work.step, work.attempt), None))
        return handler(transaction)

    task = world.consumer(noting, source=source)
    task.interruptible = interruptible
    report = world.consume(task, consuming(concurrency=1, process=retry(attempts)))
    ended = [(each.transaction.id, each.verdict, str(each.error), each.delay) for each in source.reported]
    assert task.begun() == {}
    assert task.attempts() == []
    return (
        [getattr(report, name) for name in type(report).__struct_fields__ if name != "duration"],
        ended,
        calls,
    )


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("interruptible", [False, True], ids=["plain", "interruptible"])
@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.__name__)
def test_a_brief_life_ends_as_the_general_way_ends_it(
    world: World, handler: Any, interruptible: bool, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    is_brief = slots.is_brief
    monkeypatch.setattr(slots, "is_brief", lambda of: used.append(is_brief(of)) or used[-1])  # type: ignore[func-returns-value]
    brief = lived(world, handler, interruptible, attempts)
    assert used
    assert all(used)
    monkeypatch.setattr(slots, "is_brief", lambda _: False)
    assert lived(world, handler, interruptible, attempts) == brief


@pytest.mark.parametrize("asks", [False, True], ids=["without a token", "with a token"])
def test_a_brief_life_can_be_seen_and_cut_off(world: World, asks: bool) -> None:
    begun, free = threading.Event(), threading.Event()
    expired: list[bool] = []

    def wait(_: Transaction) -> None:
        if asks:
            assert current_token() is not None
        begun.set()
        assert free.wait(30)
        expired.append(cancel_requested())

    source = SettlingSource(transactions(3))
    task = world.consumer(wait, source=source)
    task.interruptible = True
    looks: list[Any] = []

    def look() -> None:
        assert begun.wait(30)
        [attempt] = task.attempts()
        looks.append((attempt.transaction_id, attempt.step, attempt.number, attempt.stuck, attempt.stack()))
        looks.append(task.begun())
        task.hurry()
        if world.mode == "threads":  # in asyncio, the event loop has to come round first
            until(lambda: all(each.expired for each in tokens(task)))
        free.set()

    looking = threading.Thread(target=look)
    looking.start()
    report = within(40, world.consume, task, consuming(concurrency=1))
    looking.join()
    assert looks[0][:4] == ("t0", "process", 0, False)
    assert "free.wait" in looks[0][4]
    assert looks[1] == {"t0": "process"}
    if world.mode == "threads":
        assert expired == [True]
        assert (report.succeeded, report.abandoned, report.unstarted) == (0, 1, 2)
    else:
        assert report.succeeded == 1


def tokens(task: Any) -> list[Any]:
    [call] = task._engine.running.values()
    deadlines: Deadlines = call.ports.deadlines
    return [deadlines.token_of(each) for each in deadlines.tries.values()]  # type: ignore[arg-type]


@pytest.mark.parametrize("world", ["threads"], indirect=True)
def test_the_end_of_an_attempt_and_the_first_look_at_it_never_both_win(world: World) -> None:
    """Operators ask for tokens while thousands of attempts end."""
    task = world.consumer(lambda _: None, source=SettlingSource(transactions(5000)))
    task.interruptible = True
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            task.attempts()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        report = within(40, world.consume, task, consuming(concurrency=4, batch=100, mode="continuous"))
    finally:
        over.set()
        looking.join()
    assert (report.succeeded, report.stuck) == (5000, 0)
    assert task.attempts() == []


def test_a_brief_life_that_had_a_token_is_freed_without_the_garbage_collector(world: World) -> None:
    task = world.consumer(lambda _: current_token() is None, source=SettlingSource(transactions(50)))
    task.interruptible = True
    gc.collect()
    gc.disable()
    try:
        assert world.consume(task, consuming(concurrency=1)).succeeded == 50
        assert sum(type(each) is Life for each in gc.get_objects()) < 10
    finally:
        gc.enable()
