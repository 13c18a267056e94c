"""A coroutine that a handler creates and never awaits: the attempt fails and names it, and is not retried."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from typing import Any

import pytest

from onceward import AsyncConsumerTask, ConsumerTask
from onceward.task.exceptions import UnawaitedError
from onceward.task.work import OutcomeStatus
from tests.support.world import ListSource, World, consuming, retry, transactions

pytestmark = [
    pytest.mark.req("CC-062"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]


async def notify(*_: Any) -> None: ...


def line_of(function: Callable[..., Any], offset: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


def forgets(*_: Any) -> None:
    notify()


def forgets_a_variable(*_: Any) -> None:
    later = notify()
    assert later is not None


def forgets_a_list(*_: Any) -> None:
    list(map(notify, range(3)))


def swallows(*_: Any) -> None:
    with contextlib.suppress(BaseException):
        notify()


def run(behaviour: Callable[..., Any], asynchronous: bool, **more: Any) -> Any:
    """The outcome of one transaction, and of the call whose handler this is."""
    (transaction,) = transactions(1)
    if asynchronous:

        async def process(self: Any, transaction: Any) -> Any:
            result = behaviour(self, transaction)
            return await result if asyncio.iscoroutine(result) else result

        task: Any = type("Task", (AsyncConsumerTask,), {"process_transaction": process, **more})
        return asyncio.run(task({"source": AsyncSource()}).start_processing(transaction))
    task = type("Task", (ConsumerTask,), {"process_transaction": behaviour, **more})
    return task({"source": ListSource([])}).start_processing(transaction)


class AsyncSource:
    async def fetch_transactions_async(self, batch_size: int) -> list[Any]:
        return []


@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize(
    ("forgetful", "where"),
    [
        (forgets, line_of(forgets, 1)),
        (forgets_a_variable, "notify(…)"),
        (forgets_a_list, line_of(forgets_a_list, 1)),
        (swallows, line_of(swallows, 2)),
    ],
)
@pytest.mark.parametrize("interruptible", [False, True])
def test_the_attempt_fails_and_names_the_line_or_the_function(
    forgetful: Any, where: str, asynchronous: bool, interruptible: bool
) -> None:
    outcome = run(forgetful, asynchronous, interruptible=interruptible)
    assert outcome.status is OutcomeStatus.FAILED
    assert isinstance(outcome.error.cause, UnawaitedError)
    assert where in str(outcome.error)
    assert "notify(…)" in str(outcome.error)
    assert "never awaited" in str(outcome.error)


def test_it_is_never_retried_and_only_its_own_transaction_fails(world: World) -> None:
    calls: list[str] = []

    def process(transaction: Any) -> None:
        calls.append(transaction.id)
        if transaction.id == "t1":
            notify()

    task = world.consumer(process, source=ListSource(transactions(3)))
    report = world.consume(task, consuming(process=retry(5)))
    assert (report.succeeded, report.failed, calls.count("t1")) == (2, 1, 1)


@pytest.mark.parametrize("handler", ["handle_transaction_success", "handle_transaction_exception"])
def test_other_handlers_must_await_too(handler: str) -> None:
    def process(_: Any, transaction: Any) -> None:
        if handler == "handle_transaction_exception":
            raise ValueError("no")

    outcome = run(process, False, **{handler: forgets})
    assert isinstance(outcome.error.cause, UnawaitedError)


def test_a_child_task_and_a_thread_count_as_the_handler() -> None:
    async def in_a_task(*_: Any) -> None:
        async def child() -> None:
            notify()

        await asyncio.gather(child(), asyncio.sleep(0))

    async def in_a_thread(*_: Any) -> None:
        await asyncio.to_thread(forgets)

    for behaviour in (in_a_task, in_a_thread):
        assert isinstance(run(behaviour, True).error.cause, UnawaitedError)


def test_a_list_of_coroutines_as_the_result_is_refused() -> None:
    for asynchronous in (False, True):
        outcome = run(lambda *_: [notify(), notify()], asynchronous)
        assert "returned coroutines, so their code has not run" in str(outcome.error)


# ── what is right ───────────────────────────────────────────────────────────────────────────────────────


async def awaits_a_task(*_: Any) -> None:
    await asyncio.create_task(notify())


async def cancels_a_task(*_: Any) -> None:
    task = asyncio.create_task(notify())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def takes_the_first(*_: Any) -> None:
    for first in asyncio.as_completed([notify(), notify()]):
        await first
        break


async def has_no_time(*_: Any) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(9), 0)


async def closes(*_: Any) -> None:
    notify().close()


@pytest.mark.parametrize("correct", [awaits_a_task, cancels_a_task, takes_the_first, has_no_time, closes])
def test_what_is_awaited_in_another_way_or_closed_is_right(correct: Any) -> None:
    assert run(correct, True).status is OutcomeStatus.SUCCEEDED


def test_an_attempt_is_not_blamed_for_a_coroutine_of_an_earlier_one(world: World) -> None:
    """An attempt that raises before it awaits keeps its coroutine in its traceback, which is dropped later."""
    tries: list[str] = []

    def process(transaction: Any) -> None:
        tries.append(transaction.id)
        if len(tries) == 1:
            later = notify()
            raise ValueError("before it is awaited", later is None)

    task = world.consumer(process, source=ListSource(transactions(1)))
    report = world.consume(task, consuming(process=retry(3)))
    assert (report.succeeded, len(tries)) == (1, 2)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What a test leaves in tracebacks is dropped while its warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture
def unattributed() -> Iterator[list[Any]]:
    """Something that holds a coroutine nobody will await."""
    held: list[Any] = [notify()]
    yield held
    held.clear()


def test_the_garbage_collector_and_a_log_handler_blame_nobody(unattributed: list[Any]) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self
            self.coroutine = notify()

    class Forgetful(MemoryHandler):
        def shouldFlush(self, record: logging.LogRecord) -> bool:
            return False

    Cycle()
    logger = logging.Logger("old tracebacks")
    handler = Forgetful(100)
    logger.addHandler(handler)
    logger.info("%s", unattributed.pop())

    def process(*_: Any) -> None:
        gc.collect()
        handler.close()  # `close` lets go of the buffer, in the logging module

    assert run(process, False).status is OutcomeStatus.SUCCEEDED
