"""Run the same code in threads and in asyncio.

Code that makes decisions is a coroutine; code that waits is a port. In asyncio a port awaits; in threads it is an
`async def` that blocks and returns. So in threads a coroutine never suspends, and one `send` runs it to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from onceward._functions import explain_unrun, has_run, name_of
from onceward._process.forks import end_child, forks

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose ports block, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError(
        "a coroutine waits for an event loop, but this task runs in threads; use the Async… class"
    )


class Raised(Exception):
    """Carries an error of user code through coroutines, which a StopIteration cannot cross."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(raised)
        self.raised = raised

    def unwrap(self) -> Exception:
        """The original error, with the notes added on the way."""
        for note in getattr(self, "__notes__", ()):
            self.raised.add_note(note)
        return self.raised


def as_coroutine(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make a blocking function awaitable."""

    name = name_of(function)

    async def call(*args: Any, **kwargs: Any) -> Any:
        generation = forks.generation  # as `UserCode`, without its calls: every handler comes through here
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            if forks.generation != generation:
                end_child(name, error)
            if isinstance(error, StopIteration):
                raise Raised(error) from error
            raise
        if forks.generation != generation:
            end_child(name)
        if result is not None and not has_run(result):
            raise TypeError(f"{name_of(function)} {explain_unrun(result)}")
        return result

    return call


def as_function(call: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Make a coroutine function whose ports block callable."""

    def run(*args: Any, **kwargs: Any) -> T:
        try:
            return run_blocking(call(*args, **kwargs))
        except Raised as carried:
            raised = carried.unwrap()
        raise raised

    return run
