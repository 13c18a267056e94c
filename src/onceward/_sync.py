"""How one piece of code runs with threads and with asyncio.

Everything in this package that decides is a coroutine. What waits is a port: with asyncio it really awaits; with
threads it is an `async def` that blocks and returns. So with threads a coroutine never suspends, and one `send`
runs it to its end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end a coroutine whose ports block."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    coroutine.close()
    raise RuntimeError(
        "a coroutine suspended to wait for an event loop, and there is none: this task runs in threads"
    )


class Raised(Exception):
    """What user code raised, carried through coroutines: a StopIteration would not come through them."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(raised)
        self.raised = raised

    def unwrap(self) -> Exception:
        """The very object, with what was noted on the way."""
        for note in getattr(self, "__notes__", ()):
            self.raised.add_note(note)
        return self.raised


def as_coroutine(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A function that blocks, to be awaited."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except StopIteration as error:
            raise Raised(error) from error
        if inspect.iscoroutine(result):
            result.close()  # it has not run: to go on would lose what it was to do
            raise TypeError(
                f"{getattr(function, '__qualname__', function)} returned a coroutine, and this runs in threads; make "
                "it a plain `def`, or use the Async… class"
            )
        return result

    return call


def as_function(call: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """A coroutine function whose ports block, to be called."""

    def run(*args: Any, **kwargs: Any) -> T:
        try:
            return run_blocking(call(*args, **kwargs))
        except Raised as carried:
            raised = carried.unwrap()
        raise raised

    return run
