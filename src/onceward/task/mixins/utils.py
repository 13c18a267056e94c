"""Helpers of the engine that tasks, services and connectors may use too.

`run_with_timeout` and `with_context` carry the caller's context (contextvars, and so the OpenTelemetry context) into
the function they run; nothing leaks back.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from onceward.backoff import Backoff
from onceward.task.cancellation import CancelToken, cancel_requested, on_cancel
from onceward.telemetry.context import current_attempt

__all__ = [
    "cancel_requested",
    "compute_backoff",
    "on_cancel",
    "run_with_timeout",
    "run_with_timeout_async",
    "with_context",
    "with_context_async",
]

P = ParamSpec("P")
R = TypeVar("R")


def with_context(fn: Callable[P, R]) -> Callable[P, R]:
    """Bind `fn` to the current context: it sees the same context variables in any thread.

    Every call gets its own copy, so calls do not see each other's changes.
    """
    captured = contextvars.copy_context()

    @functools.wraps(fn)
    def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        return captured.copy().run(fn, *args, **kwargs)

    return bound


def with_context_async(fn: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Bind a coroutine function to the current context: it sees the same context variables in any task."""
    captured = contextvars.copy_context()

    @functools.wraps(fn)
    async def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        async def call() -> R:
            return await fn(*args, **kwargs)

        return await asyncio.create_task(call(), context=captured.copy())

    return bound


def run_with_timeout(fn: Callable[P, R], timeout: float | None, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Return `fn(*args)`, or raise `TimeoutError` after `timeout` seconds.

    A thread cannot be killed: on timeout it is asked to stop (`cancel_requested`, `on_cancel`) and goes on until it
    does; a late result is discarded. For I/O, prefer the timeout of the library. This helper starts a thread per call;
    the engine does not.
    """
    if timeout is None:
        return with_context(fn)(*args, **kwargs)
    token = CancelToken()
    outcome: list[tuple[Any, BaseException | None]] = []
    context = contextvars.copy_context()
    context.run(current_attempt.set, token)

    def call() -> None:
        try:
            outcome.append((context.run(fn, *args, **kwargs), None))
        except BaseException as error:  # noqa: BLE001  re-raised in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=call, name="onceward-timeout", daemon=True)
    with on_cancel(token.cancel):
        thread.start()
        thread.join(timeout)
    if not outcome:
        token.cancel()
        raise TimeoutError(f"{getattr(fn, '__qualname__', fn)} took longer than {timeout} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


async def run_with_timeout_async(
    fn: Callable[P, Awaitable[R]], timeout: float | None, /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Await `fn(*args)`; on timeout cancel it, wait until it has ended, and raise `TimeoutError`."""
    try:
        async with asyncio.timeout(timeout):
            return await with_context_async(fn)(*args, **kwargs)
    except TimeoutError as error:
        if error.args:
            raise
        raise TimeoutError(f"{getattr(fn, '__qualname__', fn)} took longer than {timeout} s") from None


def compute_backoff(backoff: float, multiplier: float, cap: float, attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt`, counted from 0.

    `backoff * multiplier ** attempt`, and at most `cap` when `cap` is above 0.
    """
    return Backoff(backoff, multiplier, cap).delay(attempt)
