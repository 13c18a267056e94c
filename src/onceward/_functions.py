"""Functions of users: refuse what returns before its code has run, such as a generator or a coroutine.

Calling a generator function runs none of its code, and neither does calling a coroutine function without awaiting it.
Taken for a result, either would acknowledge a message that was never processed. `check_function` refuses what can be
seen without a call; `check_result` refuses the rest, message by message.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from onceward._process.forks import end_child, forks
from onceward.errors import ConfigurationError

_LOOP = "do not use `yield`, or loop over what yields"
_AWAIT = "await it in an `async def`; a class then derives from AsyncConsumerTask or AsyncProducerTask"
_ENTER = "use it in a `with` block; `@contextmanager` is not for handlers"


@contextmanager
def _entered() -> Iterator[None]:
    yield


@asynccontextmanager
async def _entered_async() -> AsyncIterator[None]:
    yield


ENTERED: type[Any] = type(_entered())
"""What a function decorated with `@contextmanager` returns."""
ENTERED_ASYNC: type[Any] = type(_entered_async())

LAZY: dict[type, tuple[str, str]] = {
    GeneratorType: ("a generator", _LOOP),
    AsyncGeneratorType: ("an async generator", _LOOP),
    CoroutineType: ("a coroutine", _AWAIT),
    map: ("a map", "loop over it"),
    filter: ("a filter", "loop over it"),
    ENTERED: ("a context manager", _ENTER),
    ENTERED_ASYNC: ("an async context manager", _ENTER),
    Future: ("a future", "wait for its `result()`"),
}
"""What runs later, by its exact class: its name, and what to do with it."""


def has_run(result: Any) -> bool:
    """Whether a function that returned this has run to its end."""
    kind = type(result)
    if kind is list or kind is tuple:
        return not result or type(result[0]) is not CoroutineType  # [notify(user) for user in users]
    return kind not in LAZY and not hasattr(kind, "__await__")


def check_result(result: Any, function: Any) -> Any:
    """Return the result of a user's function. Raise TypeError if its code has not run, and close the result."""
    if result is None or has_run(result):
        return result
    raise TypeError(f"{name_of(function)} {explain_unrun(result)}")


def explain_unrun(result: Any) -> str:
    """Say what is wrong with such a result, and close it."""
    kind = type(result)
    if kind in (CoroutineType, GeneratorType):
        with suppress(Exception):
            result.close()  # or Python would warn that it was never awaited
    elif isinstance(result, asyncio.Future):
        with suppress(RuntimeError):  # its event loop is closed
            result.get_loop().call_soon_threadsafe(result.cancel)
    elif isinstance(result, Future):
        result.cancel()
    elif kind in (list, tuple):
        for each in result:
            if type(each) is CoroutineType:
                each.close()
        return "returned coroutines, so their code has not run; await each, or `await asyncio.gather(…)`"
    what, hint = LAZY.get(kind, (f"an awaitable ({kind.__name__})", _AWAIT))
    return f"returned {what}, so its code has not run; {hint}"


def check_awaitable(given: Any, function: Any) -> Any:
    """Return what an asyncio function returned for `await`. Raise TypeError if it cannot be awaited."""
    if type(given) is CoroutineType or inspect.isawaitable(given):
        return given
    if given is not None and not has_run(given):
        raise TypeError(f"{name_of(function)} {explain_unrun(given)}")
    raise TypeError(
        f"{name_of(function)} returned {type(given).__name__} instead of a coroutine; make it `async def`"
    )


def check_function(function: Callable[..., Any], what: str, *, asynchronous: bool) -> None:
    """Raise ConfigurationError if calling this would not run its code: it yields, or is `async def` in threads.

    A decorator decides what a call does, so the function it wraps does not count.
    """
    code = code_of(function)
    if yields(function):
        raise ConfigurationError(
            f"{what} has a `yield`, so calling it would run none of its code; remove the `yield`"
        )
    if not asynchronous and (inspect.iscoroutinefunction(code) or _is_awaitable(code)):
        raise ConfigurationError(
            f"{what} is `async def`, but it runs in threads; make it a plain `def`, or use the Async… class"
        )


def yields(function: Callable[..., Any]) -> bool:
    """Whether a call returns a generator or an async generator."""
    code = code_of(function)
    return inspect.isasyncgenfunction(code) or (inspect.isgeneratorfunction(code) and not _is_awaitable(code))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: also for partials, and for objects whose `__call__` is `async def`."""
    return inspect.iscoroutinefunction(code_of(function))


def takes_one(function: Callable[..., Any]) -> bool:
    """Whether it can be called with one value, as far as that can be known: some builtins have no signature."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def awaiting(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make an asyncio function that raises if its code has not run when it returns."""

    name = name_of(function)

    async def call(*args: Any, **kwargs: Any) -> Any:
        generation = forks.generation  # as `UserCode`, without its calls: every handler comes through here
        try:
            given = function(*args, **kwargs)
            result = await (given if type(given) is CoroutineType else check_awaitable(given, function))
        except BaseException as error:
            if forks.generation != generation:
                end_child(name, error)
            raise
        if forks.generation != generation:
            end_child(name)
        return result if result is None else check_result(result, function)

    return call


def name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def code_of(function: Any) -> Any:
    """The function or method that a call runs first."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    return getattr(type(function), "__call__", function)  # noqa: B004  its code is of interest


def _is_awaitable(code: Any) -> bool:
    """Whether it is a generator function made awaitable by `types.coroutine`."""
    flags = getattr(getattr(code, "__code__", None), "co_flags", 0)
    return bool(flags & inspect.CO_ITERABLE_COROUTINE)
