"""Contexts: each transaction has its own, in the engine and in the helpers."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace

from onceward import Transaction
from onceward.task.mixins.utils import (
    cancel_requested,
    on_cancel,
    run_with_timeout,
    run_with_timeout_async,
    with_context,
    with_context_async,
)
from onceward.testing import record
from tests.support.wait import until
from tests.support.world import (
    SHORT,
    After,
    ListSource,
    Until,
    World,
    consuming,
    results,
    retry,
    system,
    transactions,
)

marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="unset")


@pytest.mark.req("CE-30", "PE-19")
@pytest.mark.parametrize("timeout", [None, 30.0])
def test_no_transaction_sees_a_variable_of_another(world: World, timeout: float | None) -> None:
    seen: list[str] = []

    def process(transaction: Transaction) -> After:
        seen.append(marker.get())
        marker.set(transaction.id)
        return After(0.001)

    task = world.consumer(
        process, success=lambda tx, _: seen.append((marker.get() == tx.id and "own") or "other")
    )
    task.connectors["source"].items = transactions(20)
    world.consume(task, consuming(concurrency=4, process=retry(timeout=timeout)))
    assert sorted(set(seen)) == ["own", "unset"]


@pytest.mark.req("CE-30")
def test_the_caller_sees_nothing_of_what_transactions_did(world: World) -> None:
    def process(transaction: Transaction) -> None:
        marker.set("leaked")

    world.consume(world.consumer(process, source=ListSource(transactions(2))))
    assert marker.get() == "unset"


@pytest.mark.req("CE-29", "CE-30")
def test_transactions_see_what_the_caller_set(world: World) -> None:
    seen: list[str] = []
    task = world.consumer(lambda _: seen.append(marker.get()), source=ListSource(transactions(1)))
    token = marker.set("from the caller")
    try:
        world.consume(task)
    finally:
        marker.reset(token)
    assert seen == ["from the caller"]


@pytest.mark.req("CE-30")
def test_a_retry_after_a_timeout_keeps_its_transactions_context(world: World) -> None:
    seen: list[str] = []

    def process(transaction: Transaction) -> Until | None:
        seen.append(marker.get())
        marker.set(transaction.id)
        return Until(lambda: False) if len(seen) == 1 else None

    world.consume(
        world.consumer(process, source=ListSource(transactions(1))),
        consuming(process=retry(2, timeout=SHORT)),
    )
    assert seen == ["unset", "t0"]


@pytest.mark.req("CE-29")
def test_with_context_carries_variables_and_span_into_a_thread_and_leaks_nothing_back() -> None:
    with record() as recording, ThreadPoolExecutor(1) as pool:
        tracer = recording.tracer_provider.get_tracer("user")

        def work() -> tuple[str, int]:
            before = marker.get()
            marker.set("changed")
            return before, trace.get_current_span().get_span_context().span_id

        with tracer.start_as_current_span("outer") as span:
            token = marker.set("carried")
            bound = with_context(work)
            marker.reset(token)
        assert pool.submit(bound).result() == ("carried", span.get_span_context().span_id)
        assert pool.submit(bound).result()[0] == "carried"
        assert pool.submit(marker.get).result() == "unset"
        assert marker.get() == "unset"


@pytest.mark.req("CE-29")
def test_with_context_async_carries_variables_and_leaks_nothing_back() -> None:
    async def work() -> str:
        before = marker.get()
        marker.set("changed")
        await asyncio.sleep(0)
        return before

    async def main() -> tuple[str, str, str]:
        token = marker.set("carried")
        bound = with_context_async(work)
        marker.reset(token)
        return await bound(), await bound(), marker.get()

    assert asyncio.run(main()) == ("carried", "carried", "unset")


@pytest.mark.req("CE-29")
def test_run_with_timeout_carries_context_returns_raises_and_leaks_nothing_back() -> None:
    def work(value: str) -> tuple[str, str]:
        before = marker.get()
        marker.set("changed")
        return before, value

    token = marker.set("carried")
    try:
        for timeout in (None, 30.0):
            assert run_with_timeout(work, timeout, "x") == ("carried", "x")
            assert marker.get() == "carried"
    finally:
        marker.reset(token)
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(lambda: 1 / 0, 30.0)


@pytest.mark.req("CE-29")
def test_run_with_timeout_raises_at_the_deadline_and_asks_the_thread_to_stop() -> None:
    interrupted, cancelled = threading.Event(), threading.Event()

    def spin() -> None:
        with on_cancel(cancelled.set):
            cancelled.wait(30)
        if cancel_requested():
            interrupted.set()

    with pytest.raises(TimeoutError, match=r"took longer than 0\.5 s"):
        run_with_timeout(spin, 0.5)
    assert interrupted.wait(10)


@pytest.mark.req("CE-29")
def test_run_with_timeout_async_carries_context_cancels_and_leaks_nothing_back() -> None:
    cancelled: list[bool] = []

    async def work(seconds: float) -> str:
        before = marker.get()
        marker.set("changed")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return before

    async def main() -> None:
        token = marker.set("carried")
        assert await run_with_timeout_async(work, 30.0, 0) == "carried"
        assert await run_with_timeout_async(work, None, 0) == "carried"
        assert marker.get() == "carried"
        with pytest.raises(TimeoutError, match=r"took longer than 0\.02 s"):
            await run_with_timeout_async(work, 0.02, 30)
        marker.reset(token)

    asyncio.run(main())
    assert cancelled == [True]


def test_code_that_polls_learns_that_its_attempt_is_over() -> None:
    world = World("threads")
    polled: list[bool] = []

    def process(transaction: Transaction) -> None:
        if len(polled) > 1:
            return
        try:
            polled.append(cancel_requested())
            until(cancel_requested)
        finally:
            polled.append(cancel_requested())

    def exception(*_: object) -> None:
        polled.append(cancel_requested())

    task = world.consumer(process, exception=exception, source=ListSource(transactions(1)))
    world.consume(task, consuming(process=retry(timeout=0.5)))
    assert polled == [False, True, False]


def test_nothing_is_cancelled_outside_an_engine() -> None:
    assert cancel_requested() is False


@pytest.mark.req("CE-30")
def test_a_background_thread_keeps_the_context_of_the_transaction_that_started_it() -> None:
    world = World("threads")
    seen: list[tuple[str, str]] = []
    threads: list[threading.Thread] = []

    def process(transaction: Transaction) -> None:
        marker.set(transaction.id)
        thread = threading.Thread(
            target=with_context(lambda: (time.sleep(0.05), seen.append((transaction.id, marker.get()))))
        )
        threads.append(thread)
        thread.start()

    world.consume(world.consumer(process, source=ListSource(transactions(3))))
    for thread in threads:
        thread.join()
    assert {first == second for first, second in seen} == {True}


@pytest.mark.req("CE-25")
def test_retries_run_in_the_same_context_without_telemetry_too(world: World) -> None:
    seen: list[str] = []

    def process(transaction: Transaction) -> None:
        seen.append(marker.get())
        marker.set("first attempt")
        results(system() if len(seen) == 1 else None)()

    world.consume(world.consumer(process, source=ListSource(transactions(1))), consuming(process=retry(2)))
    assert seen == ["unset", "first attempt"]
