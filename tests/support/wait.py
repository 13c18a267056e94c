"""Waiting for what happens in another thread, process or coroutine."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

LIMIT = 120.0
"""Seconds. Far more than anything needs on a busy machine, and less than the suite's own timeout for a test."""
FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.05

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = LIMIT, what: str = "") -> T:
    """Wait until the condition holds, and return what it returned. `what` names it in the failure."""
    for pause in _pauses(seconds):
        if found := condition():
            return found
        time.sleep(pause)
    raise AssertionError(_failure(condition, seconds, what))


async def until_async(condition: Callable[[], Any], seconds: float = LIMIT, what: str = "") -> Any:
    """`until`, on the running event loop. The condition may be a coroutine function."""
    for pause in _pauses(seconds):
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(pause)
    raise AssertionError(_failure(condition, seconds, what))


def retry(call: Callable[[], T], on: type[Exception], seconds: float = LIMIT) -> T:
    """Call it again until it no longer raises that, and return what it returned."""
    for pause in _pauses(seconds):
        try:
            return call()
        except on:
            time.sleep(pause)
    return call()


async def retry_async(call: Callable[[], Awaitable[T]], on: type[Exception], seconds: float = LIMIT) -> T:
    """`retry`, on the running event loop."""
    for pause in _pauses(seconds):
        try:
            return await call()
        except on:
            await asyncio.sleep(pause)
    return await call()


def _pauses(seconds: float) -> Iterator[float]:
    """Short ones first, for what is about to happen; then longer ones, for what takes its time."""
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE
    while time.monotonic() < deadline:
        yield pause
        pause = min(pause * 1.5, LONGEST_PAUSE)
    yield 0.0  # one last check


def _failure(condition: Callable[[], Any], seconds: float, what: str) -> str:
    if not what:
        try:
            what = inspect.getsource(condition).strip()  # of a lambda: the whole line that has it
        except (OSError, TypeError):
            what = repr(condition)
    return f"still not so after {seconds:g} s: {what}"
