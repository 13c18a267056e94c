"""A handler whose code does not run when it is called: it yields, or returns a coroutine that is never awaited."""

from __future__ import annotations

import functools
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from onceward import AsyncConsumerTask, AsyncProducerTask, ConsumerTask, ProducerTask
from onceward.errors import ConfigurationError
from onceward.task.exceptions import LoopError
from onceward.task.mixins.policies import RetryPolicy
from onceward.testing import record
from tests.support.world import (
    ListSource,
    SettlingSource,
    World,
    consuming,
    producing,
    retry,
    transactions,
)

PROCESS = ["process_transaction", "handle_transaction_success", "handle_transaction_exception"]
PRODUCE = ["produce_transaction", "handle_produce_success", "handle_produce_exception"]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as "coroutine was never awaited"
        yield


def yielding(self: Any, *_: Any) -> Iterator[None]:
    yield


async def yielding_async(self: Any, *_: Any) -> AsyncIterator[None]:
    yield


async def coroutine(*_: Any) -> None: ...


def plain(*_: Any) -> None: ...


class Called:
    async def __call__(self, *_: Any) -> None: ...


class CalledYielding:
    def __call__(self, *_: Any) -> Iterator[None]:
        yield


ALWAYS_WRONG = [
    yielding,
    yielding_async,
    staticmethod(yielding),
    classmethod(yielding),
    staticmethod(functools.partial(yielding, None)),
    functools.partialmethod(yielding),
    CalledYielding(),
]
WRONG_IN_THREADS = [
    staticmethod(coroutine),
    staticmethod(functools.partial(coroutine, None)),
    functools.partialmethod(coroutine),
    Called(),
]


def kind(handler: Any) -> str:
    return type(handler).__name__


def define(world: World, name: str, handler: Any) -> Any:
    """A task class with this handler, and a correct one where one is required."""
    base: Any = {
        (PROCESS[0], False): ConsumerTask,
        (PROCESS[0], True): AsyncConsumerTask,
        (PRODUCE[0], False): ProducerTask,
        (PRODUCE[0], True): AsyncProducerTask,
    }[required := PRODUCE[0] if name in PRODUCE else PROCESS[0], world.asynchronous]
    return type("Orders", (base,), {required: coroutine if world.asynchronous else plain, name: handler})


@pytest.mark.req("CE-48")
@pytest.mark.parametrize("handler", ALWAYS_WRONG, ids=kind)
@pytest.mark.parametrize("name", PROCESS + PRODUCE)
def test_a_handler_that_yields_is_refused_at_construction(world: World, name: str, handler: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Orders\.{name} has a `yield`.*remove the `yield`"):
        define(world, name, handler)(connectors={"source": ListSource()})


@pytest.mark.parametrize("handler", WRONG_IN_THREADS, ids=kind)
@pytest.mark.parametrize("name", PROCESS + PRODUCE)
def test_an_async_handler_in_threads_is_refused_at_construction(name: str, handler: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Orders\.{name} is `async def`"):
        define(World("threads"), name, handler)(connectors={"source": ListSource()})


# ── what only shows when it is called ───────────────────────────────────────────────────────────────────


def in_threads(self: Any, *_: Any) -> Any:
    return coroutine()


async def in_asyncio(self: Any, *_: Any) -> Any:
    return coroutine()


def generator_in_threads(self: Any, *_: Any) -> Any:
    return yielding(self)


async def generator_in_asyncio(self: Any, *_: Any) -> Any:
    return yielding_async(self)


@functools.wraps(coroutine)
def decorated(self: Any, *_: Any) -> Any:
    return yielding_async(self)


@functools.wraps(coroutine)
def returning_none(self: Any, *_: Any) -> Any:
    return None


HIDDEN = [
    ("threads", in_threads, "returned a coroutine, so its code has not run"),
    ("threads", lambda self, *_: coroutine(), "returned a coroutine, so its code has not run"),
    ("threads", generator_in_threads, "returned a generator, so its code has not run"),
    ("asyncio", in_asyncio, "returned a coroutine, so its code has not run"),
    ("asyncio", generator_in_asyncio, "returned an async generator, so its code has not run"),
    ("asyncio", decorated, "returned an async generator, so its code has not run"),
    ("asyncio", returning_none, "returned NoneType instead of a coroutine; make it `async def`"),
]


@pytest.mark.req("CE-48")
@pytest.mark.parametrize("telemetry", [nullcontext, record])
@pytest.mark.parametrize("process", [retry(), retry(timeout=30), retry(2)])
@pytest.mark.parametrize(("mode", "handler", "problem"), HIDDEN)
def test_a_message_fails_if_its_handler_returns_before_it_has_run(
    mode: str, handler: Callable[..., Any], problem: str, process: RetryPolicy, telemetry: Any
) -> None:
    world = World(mode)
    source = SettlingSource(transactions(1))
    cls = define(world, PROCESS[0], handler)
    errors: list[Exception] = []
    cls.handle_transaction_exception = world.handler(lambda _, error: errors.append(error))
    with telemetry():
        report = world.consume(cls(connectors={"source": source}), consuming(process=process))
    assert (report.succeeded, report.failed) == (0, 1)
    assert problem in str(errors[0])
    assert source.verdicts() == {"t0": "failed"}


@pytest.mark.parametrize(("mode", "handler", "problem"), HIDDEN)
def test_a_success_handler_that_returns_before_it_has_run_fails_its_message(
    mode: str, handler: Callable[..., Any], problem: str
) -> None:
    world = World(mode)
    task = define(world, PROCESS[1], handler)(connectors={"source": ListSource(transactions(1))})
    assert world.consume(task).failed == 1


@pytest.mark.parametrize(("mode", "handler", "problem"), HIDDEN)
def test_a_message_is_not_produced_by_a_handler_that_has_not_run(
    mode: str, handler: Callable[..., Any], problem: str
) -> None:
    world = World(mode)
    task = define(world, PRODUCE[0], handler)(connectors={})
    assert world.produce(task, transactions(1), producing()).failed == 1


@pytest.mark.parametrize("method", ["fetch_transactions", "settle_transactions"])
def test_a_source_that_returns_a_coroutine_has_not_answered(world: World, method: str) -> None:
    source = SettlingSource(transactions(1))
    answer = in_asyncio if world.asynchronous else in_threads
    setattr(source, f"{method}_async" if world.asynchronous else method, answer.__get__(source))
    with pytest.raises(LoopError, match="returned a coroutine, so its code has not run"):
        world.consume(world.consumer(source=source))
