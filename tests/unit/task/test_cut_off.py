"""An attempt that is cut off because the run ends is reported in one line, and not as a timeout of a policy."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from onceward import AsyncConsumerTask, Transaction, cancel_requested
from onceward.task.report import Report, StopReason
from onceward.testing import record
from tests.support.wait import until, until_async
from tests.support.world import (
    SHORT,
    Deaf,
    SettlingSource,
    Until,
    World,
    consuming,
    producing,
    retry,
    transactions,
    within,
)

LIMITS = pytest.mark.parametrize(
    "limit", [{"process": retry(3, timeout=60.0)}, {"timeout": 600.0}], ids=["step", "loop"]
)
FOREVER = Until(lambda: False, limit=50.0)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [line for line in caplog.records if line.name.startswith("onceward")]


def hurried(task: Any, world: World, call: Callable[[], Report], begun: int = 1) -> Report:
    """The report of a call that is hurried after this many transactions have begun."""

    def hurry() -> None:
        until(lambda: len(world.calls) >= begun)
        task.stop()
        task.hurry()

    thread = threading.Thread(target=hurry, daemon=True)
    thread.start()
    report = within(40, call)
    thread.join()
    assert isinstance(report, Report)
    return report


@pytest.mark.req("CE-36")
@LIMITS
def test_an_attempt_that_is_hurried_has_one_line_that_says_why(
    world: World, caplog: pytest.LogCaptureFixture, limit: dict[str, Any]
) -> None:
    task = world.consumer(lambda _: FOREVER, source=SettlingSource(transactions(2)))
    policy = consuming(concurrency=2, **limit)
    report = hurried(task, world, lambda: world.consume(task, policy), begun=2)
    assert sorted((line.levelname, line.getMessage(), line.exc_info) for line in lines(caplog)) == [
        (
            "WARNING",
            f"process was cut off because the run is ending; transaction t{number} is abandoned",
            None,
        )
        for number in range(2)
    ]
    assert {vars(line)["transaction_id"] for line in lines(caplog)} == {"t0", "t1"}
    assert {vars(line)["step"] for line in lines(caplog)} == {"process"}
    assert (report.abandoned, report.stop_reason) == (2, StopReason.STOPPED)


@LIMITS
def test_an_attempt_that_is_hurried_is_counted_as_abandoned_and_not_as_a_time_out(
    world: World, limit: dict[str, Any]
) -> None:
    with record() as recording:
        task = world.consumer(lambda _: FOREVER, source=SettlingSource(transactions(1)))
        report = hurried(task, world, lambda: world.consume(task, consuming(**limit)))
        span = dict(recording.span("process").attributes or {})
        assert recording.metric("onceward.transactions.abandoned") == 1
        assert not recording.metric("onceward.attempts.timeouts")
    assert (report.abandoned, report.timed_out, report.failed) == (1, 0, 0)
    assert span["exception.message"] == "cut off because the run is ending"
    assert "category" not in span


def test_the_line_does_not_wait_for_an_attempt_that_does_not_end(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()
    task = world.consumer(lambda _: Deaf(let_go, limit=30.0), source=SettlingSource(transactions(1)))

    def release_when_reported() -> None:
        until(lambda: lines(caplog))
        let_go.set()

    thread = threading.Thread(target=release_when_reported, daemon=True)
    thread.start()
    report = hurried(task, world, lambda: world.consume(task, consuming(timeout=600.0)))
    thread.join()
    assert len(lines(caplog)) == 1
    assert (report.abandoned, report.stuck) == (1, 0)


def cleaning_up_in_vain(world: World) -> Any:
    """A method that raises its own error when it is cut off."""
    if world.asynchronous:

        async def method(_: Any, transaction: Transaction) -> None:
            world.calls.append(("produce", transaction.id))
            try:
                await asyncio.sleep(50)
            except asyncio.CancelledError as error:
                raise OSError("could not roll back") from error
    else:

        def method(_: Any, transaction: Transaction) -> None:
            world.calls.append(("produce", transaction.id))
            until(cancel_requested)
            raise OSError("could not roll back")

    return method


@pytest.mark.parametrize("watched", [False, True])
def test_what_an_attempt_raises_when_it_is_cut_off_is_no_failure(
    world: World, caplog: pytest.LogCaptureFixture, watched: bool
) -> None:
    def call() -> Report:
        if not watched:
            return world.produce(task, transactions(1), producing(timeout=600.0))
        with record():
            return world.produce(task, transactions(1), producing(timeout=600.0))

    task = world.producer()
    type(task).produce_transaction = cleaning_up_in_vain(world)
    report = hurried(task, world, call)
    [line] = lines(caplog)
    assert "because the run is ending" in line.getMessage()
    assert line.exc_info is None
    assert (report.abandoned, report.failed) == (1, 0)


def test_what_a_loop_timeout_cuts_off_says_which_limit_it_was(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    task = world.consumer(lambda _: FOREVER, source=SettlingSource(transactions(1)))
    with pytest.raises(TimeoutError):
        within(40, world.consume, task, consuming(timeout=2 * SHORT))
    assert sorted(line.getMessage() for line in lines(caplog)) == [
        "process attempt 1 ran out of time (loop limit)",
        "process was cut off; transaction t0 is abandoned",
    ]


@pytest.mark.req("CE-36")
def test_what_a_cancellation_cuts_off_has_one_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[str] = []

    class Waiting(AsyncConsumerTask):
        async def process_transaction(self, transaction: Transaction) -> None:
            begun.append(transaction.id)
            await asyncio.sleep(50)

    class Source:
        given = transactions(2)

        async def fetch_transactions_async(self, size: int) -> list[Transaction]:
            batch, self.given = self.given, []
            return batch

    async def cancelled() -> None:
        call = asyncio.create_task(
            Waiting({"source": Source()}).consume_transactions(consuming(concurrency=2))
        )
        await until_async(lambda: len(begun) >= 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    within(40, asyncio.run, cancelled())
    assert sorted((line.getMessage(), line.exc_info) for line in lines(caplog)) == [
        (f"process was cut off; transaction t{number} is abandoned", None) for number in range(2)
    ]
