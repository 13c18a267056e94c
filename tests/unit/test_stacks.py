"""Where code is: the stack of a thread, or of a coroutine, without what is around the handler."""

from __future__ import annotations

import asyncio
import threading

import pytest

from onceward._process.stacks import FRAMES, coroutine_stack, error_stack, thread_stack
from onceward._sync import run_blocking
from onceward.task.exceptions import TransactionException

pytestmark = pytest.mark.req("UI-18")


def wait_deep(depth: int, waits: threading.Event, over: threading.Event) -> None:
    if depth:
        wait_deep(depth - 1, waits, over)
    else:
        waits.set()
        over.wait(60)


@pytest.mark.parametrize("depth", [0, 3 * FRAMES])
def test_the_stack_of_a_thread_begins_outside_the_engine_and_ends_where_it_waits(depth: int) -> None:
    waits, over = threading.Event(), threading.Event()

    async def handle() -> None:
        wait_deep(depth, waits, over)

    thread = threading.Thread(target=lambda: run_blocking(handle()))
    thread.start()
    try:
        assert waits.wait(60)
        assert thread.ident is not None
        stack = thread_stack(thread.ident)
    finally:
        over.set()
        thread.join()
    lines = stack.splitlines()
    assert "threading.py" not in lines[0]
    assert "over.wait(60)" in stack
    assert ("in handle" in stack) == (depth == 0), "the innermost frames, if there are many"
    assert stack.count("wait_deep") <= 2 * FRAMES
    assert thread_stack(thread.ident) == "", "it has ended"


def test_the_stack_of_a_coroutine_goes_down_to_what_it_awaits() -> None:
    async def outer() -> None:
        await inner()

    async def inner() -> None:
        await asyncio.sleep(60)

    async def look() -> str:
        awaited = outer()
        task = asyncio.ensure_future(awaited)
        await asyncio.sleep(0)
        stack = coroutine_stack(awaited, threading.get_ident())
        task.cancel()
        return stack

    lines = asyncio.run(look()).splitlines()
    places = [line.rpartition(" in ")[2] for line in lines if line.startswith("  File")]
    assert places[:3] == ["outer", "inner", "sleep"]


def test_a_coroutine_that_runs_has_the_stack_of_its_thread() -> None:
    found: list[str] = []

    async def handle() -> None:
        found.append(coroutine_stack(awaited, threading.get_ident()))

    awaited = handle()
    asyncio.run(awaited)
    assert "in handle" in found[0]


@pytest.mark.req("UI-26")
def test_the_stack_of_an_error_is_that_of_the_code_which_failed() -> None:
    def divide(number: int) -> float:
        return 1 / number

    def fail() -> None:
        try:
            divide(0)
        except ZeroDivisionError as error:
            raise TransactionException("wrapped") from error

    with pytest.raises(TransactionException) as raised:
        fail()
    found = error_stack(raised.value) or ""
    assert "in fail" in found
    cause = error_stack(raised.value.__cause__) or ""
    assert "return 1 / number" in cause
    wrapped = TransactionException("by the engine, which raises nothing")
    wrapped.__cause__ = raised.value.__cause__
    assert error_stack(wrapped) == cause
    assert error_stack(TransactionException("never raised")) is None
    assert error_stack(None) is None
