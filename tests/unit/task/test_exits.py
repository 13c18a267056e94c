"""Which exceptions go through the engine to the caller, and which do not."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import pytest

from onceward.task.exceptions import ExceptionCategory, FetchException
from onceward.task.report import StopReason
from onceward.task.settings import EngineSettings
from tests.support.wait import until_async
from tests.support.world import (
    After,
    Deaf,
    ListSource,
    SettlingSource,
    Until,
    World,
    consuming,
    results,
    retry,
    transactions,
    within,
)
from tests.unit.task.test_consumer_loop import run_process

pytestmark = pytest.mark.timeout(60)

EXITS = [KeyboardInterrupt, SystemExit, GeneratorExit]


# ── ordinary failures ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-06", "CE-36")
@pytest.mark.parametrize(
    "error", [StopIteration, StopAsyncIteration, asyncio.CancelledError, asyncio.TimeoutError]
)
@pytest.mark.parametrize("step", ["process", "success", "exception"])
@pytest.mark.parametrize("limit", [None, 20.0], ids=["unlimited", "limited"])
def test_odd_exceptions_of_user_code_are_failures_like_any_other(
    world: World, error: type[BaseException], step: str, limit: float | None
) -> None:
    steps: dict[str, Any] = {"process": results("r"), "success": results(None), "exception": results(None)}
    if step == "exception":
        steps["process"] = results(OSError())
    steps[step] = lambda *_: error()
    task = world.consumer(**steps, source=ListSource(transactions(2)))
    some = retry(2, timeout=limit)
    report = world.consume(task, consuming(process=some, success=some, exception=some))
    assert (report.failed, report.stop_reason) == (2, StopReason.EMPTY)
    assert world.steps_of("t1").count(step) == 2
    assert report.failed_by_category[ExceptionCategory.SYSTEM] == 2


@pytest.mark.req("CE-06")
def test_a_cancelled_error_after_a_wait_is_a_failure_like_any_other(world: World) -> None:
    task = world.consumer(lambda _: After(0.01, asyncio.CancelledError()), source=ListSource(transactions(2)))
    assert world.consume(task, consuming(process=retry(2))).failed == 2


@pytest.mark.req("CE-12")
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, asyncio.CancelledError])
def test_odd_exceptions_of_a_connector_are_fetch_errors(world: World, error: type[BaseException]) -> None:
    with pytest.raises(FetchException):
        world.consume(world.consumer(source=ListSource(script=[After(0.01, error())])))


# ── exits ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-36")
@pytest.mark.parametrize("exit_", EXITS)
@pytest.mark.parametrize("step", ["process", "success", "exception"])
@pytest.mark.parametrize("limit", [None, 20.0], ids=["unlimited", "limited"])
@pytest.mark.parametrize("wait", [0.0, 0.01], ids=["at once", "after a wait"])
def test_an_exit_goes_to_the_caller_and_is_not_retried(
    world: World, exit_: type[BaseException], step: str, limit: float | None, wait: float
) -> None:
    raised = exit_("leaving")
    steps: dict[str, Any] = {"process": results("r"), "success": results(None), "exception": results(None)}
    if step == "exception":
        steps["process"] = results(OSError())
    steps[step] = lambda *_: After(wait, raised) if wait else raised
    task = world.consumer(**steps, source=ListSource(transactions(1)))
    main, other = retry(1 if step == "exception" else 3, timeout=limit), retry(3, timeout=limit)
    with pytest.raises(exit_, match="leaving"):
        within(10, world.consume, task, consuming(process=main, success=other, exception=other))
    assert world.steps_of("t0").count(step) == 1


@pytest.mark.req("CE-31", "CE-36")
def test_after_an_exit_nothing_more_is_started(world: World) -> None:
    task = world.consumer(
        lambda each: SystemExit() if each.id == "t0" else None, source=ListSource(transactions(5))
    )
    with pytest.raises(SystemExit):
        world.consume(task)
    assert world.calls == [("process", "t0")]


@pytest.mark.req("CE-36")
@pytest.mark.parametrize("exit_", EXITS)
@pytest.mark.parametrize("limit", [None, 20.0], ids=["unlimited", "limited"])
def test_work_in_flight_finishes_before_an_exit_goes_on(
    world: World, exit_: type[BaseException], limit: float | None
) -> None:
    ended: list[str] = []
    leaving: list[bool] = []

    def all_are_in_flight() -> bool:
        leaving.extend([True] * (len(world.calls) >= 3))
        return bool(leaving)

    task = world.consumer(
        lambda each: (
            Until(all_are_in_flight, exit_()) if each.id == "t0" else Until(lambda: leaving, After(0.8))
        ),
        success=lambda each, _: ended.append(each.id),
        source=ListSource(transactions(6)),
    )
    with pytest.raises(exit_):
        world.consume_then(
            task, consuming(concurrency=3, process=retry(1, timeout=limit)), lambda: ended.append("call")
        )
    assert sorted(ended[:-1]) == ["t1", "t2"]
    assert ended[-1] == "call"


@pytest.mark.req("CE-36")
@pytest.mark.parametrize("exit_", EXITS)
def test_work_in_flight_finishes_before_an_exit_of_the_connector_goes_on(
    world: World, exit_: type[BaseException]
) -> None:
    ended: list[str] = []
    leaving: list[bool] = []

    def all_are_in_flight() -> bool:
        leaving.extend([True] * (len(world.calls) >= 2))
        return bool(leaving)

    source = SettlingSource(script=[transactions(2), Until(all_are_in_flight, exit_())])
    task = world.consumer(
        lambda _: Until(lambda: leaving, After(0.3)),
        success=lambda each, _: ended.append(each.id),
        source=source,
    )
    with pytest.raises(exit_):
        world.consume_then(task, consuming(concurrency=4, mode="continuous"), lambda: ended.append("call"))
    assert sorted(ended[:-1]) == ["t0", "t1"]
    assert ended[-1] == "call"
    assert set(source.verdicts()) == {"t0", "t1"}


@pytest.mark.req("CE-36")
def test_a_task_can_consume_again_after_an_exit(world: World) -> None:
    source = ListSource(script=[transactions(1), transactions(1), []])
    task = world.consumer(results(SystemExit(), "r"), source=source)
    with pytest.raises(SystemExit):
        world.consume(task)
    assert within(20, world.consume, task).succeeded == 1


# ── cancelling the call ─────────────────────────────────────────────────────────────────────────────────


def cancelled_call(world: World, task: Any, policy: Any, when: Any) -> tuple[BaseException | None, float]:
    """Cancel a consume call when the condition holds; returns what it raised, and how long that took."""

    async def main() -> tuple[BaseException | None, float]:
        call = asyncio.create_task(task.consume_transactions(policy))
        await until_async(when)
        call.cancel()
        began = time.monotonic()
        ends = await asyncio.gather(call, return_exceptions=True)
        return (ends[0] if isinstance(ends[0], BaseException) else None), time.monotonic() - began

    ended: tuple[BaseException | None, float] = within(20, asyncio.run, main())
    return ended


@pytest.mark.req("CE-36")
@pytest.mark.parametrize("limit", [None, 20.0], ids=["unlimited", "limited"])
def test_cancelling_the_call_cancels_its_work_and_ends_promptly(limit: float | None) -> None:
    world = World("asyncio")
    task = world.consumer(
        lambda _: Until(lambda: False),
        success=results(None),
        exception=results(None),
        source=ListSource(transactions(5)),
    )
    policy = consuming(concurrency=2, process=retry(3, timeout=limit))
    error, seconds = cancelled_call(world, task, policy, lambda: len(world.calls) == 2)
    assert isinstance(error, asyncio.CancelledError)
    assert seconds < 5
    assert sorted(world.calls) == [("process", "t0"), ("process", "t1")]


@pytest.mark.req("CE-36")
def test_cancelling_the_call_ends_a_backoff() -> None:
    world = World("asyncio")
    task = world.consumer(results(OSError()), exception=results(None), source=ListSource(transactions(1)))
    error, seconds = cancelled_call(
        world, task, consuming(process=retry(2, backoff=60)), lambda: len(world.calls) == 1
    )
    assert isinstance(error, asyncio.CancelledError)
    assert seconds < 5
    assert world.steps_of("t0") == ["process"]


@pytest.mark.req("CE-36")
@pytest.mark.parametrize("streaming", [False, True])
def test_cancelling_the_call_ends_a_fetch_or_the_wait_for_the_next(streaming: bool) -> None:
    world = World("asyncio")
    source = ListSource(script=[] if streaming else [Until(lambda: False)])
    task = world.consumer(source=source)
    error, seconds = cancelled_call(world, task, consuming(streaming=streaming), lambda: source.asked)
    assert isinstance(error, asyncio.CancelledError)
    assert seconds < 5


@pytest.mark.req("CE-36")
def test_cancelling_the_call_waits_for_a_handler_that_cleans_up() -> None:
    world = World("asyncio")
    cleaned: list[str] = []

    async def process(task: Any, each: Any) -> None:
        world.calls.append(("process", each.id))
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(each.id)

    task = world.consumer(source=ListSource(transactions(1)))
    type(task).process_transaction = process
    error, _ = cancelled_call(world, task, consuming(), lambda: world.calls)
    assert isinstance(error, asyncio.CancelledError)
    assert cleaned == ["t0"]


@pytest.mark.req("CE-36")
def test_cancelling_the_call_settles_nothing_that_was_cut_off() -> None:
    world = World("asyncio")
    source = SettlingSource(transactions(3))
    task = world.consumer(
        lambda _: Until(lambda: False), source=source, settings=EngineSettings(stuck_grace=1)
    )
    cancelled_call(world, task, consuming(concurrency=2), lambda: len(world.calls) == 2)
    assert {"t0", "t1"}.isdisjoint(source.verdicts())


@pytest.mark.req("CE-36")
def test_a_cancelled_task_can_consume_again() -> None:
    world = World("asyncio")
    source = ListSource(script=[transactions(1), transactions(1)])
    task = world.consumer(
        results(Until(lambda: False), "r"), source=source, settings=EngineSettings(stuck_grace=0.5)
    )
    cancelled_call(world, task, consuming(), lambda: world.calls)
    assert within(20, world.consume, task).succeeded == 1


@pytest.mark.req("CE-36")
def test_an_event_loop_closes_though_an_attempt_was_given_up_on() -> None:
    world = World("asyncio")
    end = threading.Event()
    task = world.consumer(
        lambda _: Deaf(end), source=ListSource(transactions(1)), settings=EngineSettings(stuck_grace=0.05)
    )
    policy = consuming(process=retry(1, timeout=0.05))
    report = world.consume_then(task, policy, end.set)
    assert report.stuck == 1


# ── Ctrl-C ──────────────────────────────────────────────────────────────────────────────────────────────

CONSUME = """
try:
    asyncio.run(task.consume_transactions(POLICY)) if asynchronous else task.consume_transactions(POLICY)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.req("CE-31", "CE-36")
def test_ctrl_c_lets_work_in_flight_finish_and_starts_nothing_more() -> None:
    code, lines = run_process("threads", CONSUME, signal.SIGINT)
    assert code == 0, lines
    assert lines == ["started t0", "ended t0", "interrupted"]


@pytest.mark.req("CE-31", "CE-36")
def test_ctrl_c_on_asyncio_cancels_work_in_flight() -> None:
    code, lines = run_process("asyncio", CONSUME, signal.SIGINT)
    assert code == 0, lines
    assert lines == ["started t0", "interrupted"]


@pytest.mark.req("CE-31", "CE-36")
def test_ctrl_c_twice_does_not_wait_for_a_handler() -> None:
    body = "Sync.process_transaction = lambda *_: (print('started', flush=True), time.sleep(60))" + CONSUME
    code, lines = run_process("threads", body, signal.SIGINT, signal.SIGINT)
    assert code == 0, lines
    assert lines == ["started", "interrupted"]


@pytest.mark.req("CE-31", "CE-36")
def test_ctrl_c_twice_does_not_wait_for_a_fetch() -> None:
    body = "Source.fetch_transactions = lambda *_: (print('started', flush=True), time.sleep(60))" + CONSUME
    code, lines = run_process("threads", body, signal.SIGINT, signal.SIGINT)
    assert code == 0, lines
    assert lines == ["started", "interrupted"]
