"""Middleware around sources and steps, written once for threads and asyncio."""

from __future__ import annotations

import logging
import types
from collections.abc import Sequence
from typing import Any

import pytest

from onceward import ConsumerTask, Middleware, Onceward, Transaction
from onceward.errors import ConfigurationError
from onceward.middleware import SourceCalls, StepCall, StepInfo, sleep
from onceward.transaction import Settlement, Verdict
from tests.support.world import (
    ListSource,
    SettlingSource,
    World,
    business,
    consuming,
    results,
    retry,
    system,
    transactions,
)

pytestmark = pytest.mark.req("MW-01")


class Recorder(Middleware):
    """Records what passes through it."""

    def __init__(self, label: str, log: list[str]) -> None:
        self.label = label
        self.log = log

    async def begin(self) -> None:
        self.log.append(f"{self.label} begin")

    async def end(self) -> None:
        self.log.append(f"{self.label} end")

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        async def fetch(size: int, **extra: Any) -> Sequence[Transaction]:
            batch = await source.fetch(size, **extra)
            self.log.append(f"{self.label} fetched {len(batch)}")
            return batch

        return source.replace(fetch=fetch)

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        async def around(transaction: Transaction, *rest: Any) -> Any:
            self.log.append(f"{self.label} {step.name} {transaction.id}")
            try:
                return await call(transaction, *rest)
            finally:
                self.log.append(f"{self.label} left {step.name}")

        return around


def consumer(world: World, process: Any, source: Any, *middleware: Middleware, **handlers: Any) -> Any:
    task = world.consumer(process, source=source, **handlers)
    task.middleware = middleware
    return task


def test_the_first_is_outermost_around_steps_and_sources(world: World) -> None:
    log: list[str] = []
    task = consumer(
        world,
        lambda transaction: log.append(f"handler {transaction.id}"),
        ListSource(transactions(1)),
        Recorder("outer", log),
        Recorder("inner", log),
    )
    report = world.consume(task)
    assert report.succeeded == 1
    assert log[:4] == ["outer begin", "inner begin", "inner fetched 1", "outer fetched 1"]
    assert log[4:9] == [
        "outer process t0",
        "inner process t0",
        "handler t0",
        "inner left process",
        "outer left process",
    ]
    assert log[-2:] == ["inner end", "outer end"]


def test_every_attempt_passes_and_every_step_is_named(world: World) -> None:
    log: list[str] = []
    task = consumer(
        world,
        results(system(), "done"),
        ListSource(transactions(1)),
        Recorder("m", log),
        success=lambda *_: None,
    )
    world.consume(task, consuming(process=retry(2)))
    assert [line for line in log if line.startswith("m process")] == ["m process t0"] * 2
    assert "m success t0" in log


def test_what_it_raises_is_the_failure_of_the_attempt(world: World) -> None:
    class Refusing(Middleware):
        def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
            async def refuse(*_: Any) -> Any:
                raise business("not on Sundays")

            return refuse if step.name == "process" else call

    called: list[Any] = []
    report = world.consume(consumer(world, called.append, ListSource(transactions(1)), Refusing()))
    assert (report.failed, called) == (1, [])


def test_what_a_handler_raises_reaches_it_as_raised(world: World) -> None:
    class Own(Exception):
        pass

    seen: list[BaseException] = []

    class Seeing(Middleware):
        def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
            async def see(*arguments: Any) -> Any:
                try:
                    return await call(*arguments)
                except Own as error:
                    seen.append(error)
                    return "replaced"

            return see

    error = Own()
    report = world.consume(consumer(world, results(error), ListSource(transactions(1)), Seeing()))
    assert (report.succeeded, seen) == (1, [error])


def test_a_stop_iteration_of_a_handler_is_a_failure_like_any_other() -> None:
    class Task(ConsumerTask):
        middleware = (Recorder("m", []),)

        def process_transaction(self, transaction: Transaction, /, *_: Any, **__: Any) -> Any:
            return next(iter(()))

    report = Task({"source": ListSource(transactions(1))}).consume_transactions()
    assert report.failed == 1


def test_it_may_change_what_is_settled(world: World) -> None:
    class Forgiving(Middleware):
        def wrap_source(self, source: SourceCalls) -> SourceCalls:
            async def settle(settlements: Sequence[Settlement]) -> None:
                assert source.settle is not None
                await source.settle([Settlement(each.transaction, Verdict.DONE) for each in settlements])

            return source.replace(settle=settle)

    source = SettlingSource(transactions(2))
    world.consume(consumer(world, results(system()), source, Forgiving()))
    assert set(source.verdicts().values()) == {"done"}


def test_one_that_refuses_to_begin_refuses_the_call_and_those_before_it_end(world: World) -> None:
    class Closed(Middleware):
        async def begin(self) -> None:
            raise ConfigurationError("closed today")

    log: list[str] = []
    source = ListSource(transactions(1))
    with pytest.raises(ConfigurationError, match="closed today"):
        world.consume(consumer(world, results(None), source, Recorder("m", log), Closed()))
    assert log == ["m begin", "m end"]


def test_an_error_at_the_end_is_logged_and_the_report_is_kept(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(Middleware):
        async def end(self) -> None:
            raise RuntimeError("dropped")

    with caplog.at_level(logging.ERROR, "onceward.engine"):
        report = world.consume(consumer(world, results(None), ListSource(transactions(1)), Clumsy()))
    assert report.succeeded == 1
    assert "middleware Clumsy failed at the end of the call" in caplog.text


def test_it_may_sleep_in_either_mode(world: World) -> None:
    class Slow(Middleware):
        def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
            async def wait(*arguments: Any) -> Any:
                await sleep(0.01)
                return await call(*arguments)

            return wait

    assert world.consume(consumer(world, results(None), ListSource(transactions(2)), Slow())).succeeded == 2


def test_awaiting_an_event_loop_in_threads_is_an_error_that_says_so() -> None:
    class Looping(Middleware):
        def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
            async def wait(*arguments: Any) -> Any:
                await forever()
                return await call(*arguments)

            return wait if step.name == "process" else call

    errors: list[Any] = []

    class Task(ConsumerTask):
        middleware = (Looping(),)

        def process_transaction(self, transaction: Transaction, /, *_: Any, **__: Any) -> Any: ...

        def handle_transaction_exception(self, transaction: Transaction, exc: Any) -> None:
            errors.append(exc)

    Task({"source": ListSource(transactions(1))}).consume_transactions()
    assert "this task runs in threads" in str(errors[0])


@types.coroutine
def forever() -> Any:
    yield


def test_a_step_nobody_wraps_is_the_bare_method(world: World) -> None:
    """So an empty list costs nothing."""
    from onceward.task import plan
    from onceward.task.call import Call

    task = consumer(world, results(None), ListSource())
    wiring = plan.consumer(task, None)
    assert wiring.source is not None
    assert wiring.source.fetch.call == getattr(task.connectors["source"], task._fetch_method)
    assert Call(task, wiring)._wrap(wiring.main).call == task.process_transaction


def test_a_producer_has_it_too(world: World) -> None:
    log: list[str] = []
    task = world.producer(results(None))
    task.middleware = (Recorder("m", log),)
    assert world.produce(task, transactions(1)).succeeded == 1
    assert "m produce t0" in log


@pytest.mark.parametrize("given", [Recorder, "audit", None])
def test_what_is_not_a_middleware_is_refused_with_how_to_write_it(given: Any) -> None:
    class Task(ConsumerTask):
        middleware = (given,)

        def process_transaction(self, transaction: Transaction, /, *_: Any, **__: Any) -> Any: ...

    with pytest.raises(ConfigurationError, match=r"instances of Middleware, not .*middleware=\[Audit\(\)\]"):
        Task({"source": ListSource()})
    with pytest.raises(ConfigurationError, match="the middleware of shop must be instances"):
        Onceward("shop", middleware=[given])
