"""Attempts of a task that is `interruptible`: without a time limit, they are what they are in any other task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onceward import AsyncConsumerTask, Transaction
from onceward.task.cancellation import current_token
from onceward.telemetry.context import current_attempt, current_work
from tests.support.world import SettlingSource, World, consuming, transactions

pytestmark = pytest.mark.timeout(60)


async def at_once(_: Transaction) -> str:
    return "done"


async def after_waiting(_: Transaction) -> str:
    await asyncio.sleep(0)
    await asyncio.sleep(0.001)
    return "done"


async def fail_at_once(_: Transaction) -> None:
    raise ValueError("no")


async def fail_after_waiting(_: Transaction) -> None:
    await asyncio.sleep(0)
    raise ValueError("no")


async def cancel_itself(_: Transaction) -> None:
    raise asyncio.CancelledError


async def await_what_is_canceled(_: Transaction) -> None:
    waiting = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(waiting.cancel)
    await waiting


async def catch_what_is_thrown(_: Transaction) -> str:
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_exception, KeyError("thrown"))
    try:
        await future
    except KeyError:
        await asyncio.sleep(0)
        return "caught"
    return "missed"


def stop_before_it_is_awaited(_: Transaction) -> Any:
    raise StopIteration("not a result")


def return_nothing_to_await(_: Transaction) -> Any:
    return 5


HANDLERS = [
    at_once,
    after_waiting,
    fail_at_once,
    fail_after_waiting,
    cancel_itself,
    await_what_is_canceled,
    catch_what_is_thrown,
    stop_before_it_is_awaited,
    return_nothing_to_await,
]


def verdicts(handler: Callable[[Transaction], Any], *, interruptible: bool) -> Any:
    class Task(AsyncConsumerTask):
        process_transaction: Any = lambda self, transaction: handler(transaction)

    Task.process_transaction.__wrapped__ = handler

    async def main() -> Any:
        source = SettlingSource(transactions(4))
        task = Task({"source": source})
        task.interruptible = interruptible
        report = await task.consume_transactions(consuming(concurrency=2))
        return report.succeeded, report.failed, sorted(each.verdict for each in source.reported)

    return asyncio.run(main())


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.__name__)
def test_an_interruptible_attempt_in_asyncio_ends_like_any_other(handler: Any) -> None:
    assert verdicts(handler, interruptible=True) == verdicts(handler, interruptible=False)


def test_an_interruptible_attempt_has_a_token_until_it_has_ended(world: World) -> None:
    tokens: list[Any] = []
    steps: list[str] = []

    def handle(_: Transaction) -> None:
        tokens.append(current_token())
        work = current_work.get()
        assert work is not None
        steps.append(work.step)

    task = world.consumer(
        handle, success=lambda *_: tokens.append(current_token()), source=SettlingSource(transactions(1))
    )
    task.interruptible = True
    assert world.consume(task).succeeded == 1
    first, second = tokens
    assert steps == ["process"]
    assert first is not second
    assert first.over
    assert second.over
    assert current_attempt.get() is None
