"""Functions that return before their code has run."""

from __future__ import annotations

import asyncio
import functools
import types
import warnings
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from onceward._functions import check_function, check_result, is_async
from onceward.errors import ConfigurationError


def plain(*_: Any) -> None: ...
async def coroutine(*_: Any) -> None: ...


def generator(*_: Any) -> Iterator[None]:
    yield


async def async_generator(*_: Any) -> AsyncIterator[None]:
    yield


@types.coroutine
def old_style(*_: Any) -> Generator[Any, Any, None]:
    yield


def calling(function: Any) -> Any:
    """An object that runs this when it is called."""

    class Handler:
        __call__ = function

    return Handler()


def kind(function: Any) -> str:
    return type(function).__name__


class Methods:
    generator = generator
    fixed = staticmethod(async_generator)
    of_class = classmethod(generator)
    part = functools.partialmethod(generator, 1)


@functools.wraps(generator)
def draining(*args: Any) -> None:
    for _ in generator(*args):
        pass


@functools.wraps(coroutine)
def running(*args: Any) -> None:
    asyncio.run(coroutine(*args))


YIELDING = [
    generator,
    async_generator,
    functools.partial(generator, 1),
    functools.partial(functools.partial(async_generator, 1), 2),
    calling(generator),
    calling(async_generator),
    functools.partial(calling(generator), 1),
    Methods().generator,
    Methods().fixed,
    Methods().of_class,
    Methods().part,
]
AWAITED = [coroutine, functools.partial(coroutine, 1), calling(coroutine), old_style]
FINE = [plain, functools.partial(plain, 1), calling(plain), MagicMock(), print, draining, running, dict]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("function", YIELDING, ids=kind)
def test_a_function_that_yields_is_refused(function: Any, asynchronous: bool) -> None:
    with pytest.raises(ConfigurationError, match="the handler has a `yield`, so calling it would run none"):
        check_function(function, "the handler", asynchronous=asynchronous)


@pytest.mark.parametrize("function", AWAITED, ids=kind)
def test_an_async_function_is_refused_in_threads_only(function: Any) -> None:
    check_function(function, "the handler", asynchronous=True)
    with pytest.raises(ConfigurationError, match="the handler is `async def`, but it runs in threads"):
        check_function(function, "the handler", asynchronous=False)


@pytest.mark.parametrize("function", FINE, ids=kind)
def test_a_plain_function_is_not_refused_whatever_it_wraps(function: Any) -> None:
    for asynchronous in (False, True):
        check_function(function, "the handler", asynchronous=asynchronous)
    assert not is_async(function)


class Promise:
    def __await__(self) -> Iterator[None]:
        yield


UNRUN = [
    (generator, "a generator"),
    (async_generator, "an async generator"),
    (coroutine, "a coroutine"),
    (old_style, "a generator"),
    (Promise, r"an awaitable \(Promise\)"),
    (AsyncMock(), "a coroutine"),
    (lambda: (each for each in "ab"), "a generator"),
    (lambda: map(plain, "ab"), "a map"),
    (lambda: filter(plain, "ab"), "a filter"),
    (contextmanager(generator), "a context manager"),
    (asynccontextmanager(async_generator), "an async context manager"),
    (Future, "a future"),
]


@pytest.mark.parametrize(("function", "what"), UNRUN)
def test_a_result_whose_code_has_not_run_is_refused_and_closed(function: Any, what: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as "coroutine was never awaited"
        with pytest.raises(TypeError, match=f"returned {what}, so its code has not run"):
            check_result(function(), function)


def test_a_future_of_a_thread_pool_is_refused_and_cancelled() -> None:
    future: Future[None] = Future()
    with pytest.raises(TypeError, match=r"plain returned a future, .* wait for its `result\(\)`"):
        check_result(future, plain)
    assert future.cancelled()


def test_a_task_is_refused_and_cancelled() -> None:
    async def main() -> bool:
        task = asyncio.create_task(asyncio.sleep(60))
        with pytest.raises(TypeError, match=r"plain returned an awaitable \(Task\)"):
            check_result(task, plain)
        await asyncio.wait((task,))
        return task.cancelled()

    assert asyncio.run(main())


@pytest.mark.parametrize(
    "result", [None, 0, "text", [1], {}, iter([1]), object(), MagicMock(), plain, Promise]
)
def test_any_other_result_is_returned(result: Any) -> None:
    assert check_result(result, plain) is result
