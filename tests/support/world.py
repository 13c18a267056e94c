"""Both modes behind the same calls: behaviors are plain functions, and `World` makes tasks and sources of them.

A behavior is called with the engine's arguments. It returns a value or raises; or it returns `After(seconds, value)`,
which sleeps in the way of the mode before it returns the value.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onceward import (
    AsyncConsumerTask,
    AsyncHybridTask,
    AsyncProducerTask,
    ConsumerTask,
    HybridTask,
    ProducerTask,
    Transaction,
    cancel_requested,
)
from onceward.task.exceptions import AttemptInterrupted, ExceptionCategory, TransactionException
from onceward.task.mixins.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    ExceptionPolicy,
    FetchPolicy,
    ProcessPolicy,
    ProducePolicy,
    ProducerLoopPolicy,
    ProducerPolicy,
    ProducerSteps,
    RetryPolicy,
    SuccessPolicy,
)
from onceward.task.report import Report
from onceward.task.settings import EngineSettings
from onceward.testing.clock import FakeClock
from onceward.transaction import Settlement
from tests.support.wait import until, until_async

Behaviour = Callable[..., Any]

SHORT = 0.5
"""Seconds: a time limit that is reached soon, but not before a delayed thread has done quick work."""


@dataclass
class After:
    seconds: float
    value: Any = None


@dataclass
class Until:
    """Wait, in the way of the mode, until the condition holds or the attempt is asked to stop; fail after `limit`
    seconds."""

    condition: Callable[[], Any]
    value: Any = None
    limit: float = 30.0


@dataclass
class Deaf:
    """Wait for an event and ignore interrupts and cancellations until it is set. Gives up, and says so, after `limit`
    seconds."""

    event: threading.Event
    value: Any = None
    limit: float = 5.0
    gave_up: bool = False

    def wait(self) -> None:
        try:
            self.event.wait(self.limit)
        finally:
            self.gave_up = not self.event.is_set()

    async def wait_async(self) -> None:
        began = time.monotonic()
        while not self.event.is_set() and not self.gave_up:
            self.gave_up = time.monotonic() - began > self.limit
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.002)


@dataclass
class Exactly:
    """This value, even if it is an exception: it is returned, not raised."""

    value: Any


def business(text: str = "no") -> TransactionException:
    return TransactionException(text, category=ExceptionCategory.BUSINESS)


def system(text: str = "broken") -> TransactionException:
    return TransactionException(text, category=ExceptionCategory.SYSTEM)


def timeout(text: str = "late") -> TransactionException:
    return TransactionException(text, category=ExceptionCategory.TIMEOUT)


def transactions(count: int, start: int = 0) -> list[Transaction]:
    return [Transaction(id=f"t{number}", payload=number) for number in range(start, start + count)]


def results(*script: Any) -> Behaviour:
    """A behavior that plays a script: exceptions are raised, anything else is returned; the last entry repeats."""
    remaining = list(script)
    lock = threading.Lock()

    def play(*_: Any) -> Any:
        with lock:
            item = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if isinstance(item, BaseException):
            raise item.with_traceback(None)  # it would grow each time
        return item

    return play


def resolve(value: Any) -> Any:
    if isinstance(value, Exactly):
        return value.value
    if isinstance(value, Deaf):
        value.wait()
        return resolve(value.value)
    if isinstance(value, After):
        time.sleep(value.seconds)
        return resolve(value.value)
    if isinstance(value, Until):
        until(lambda: value.condition() or cancel_requested(), value.limit)
        if cancel_requested():
            raise AttemptInterrupted
        return resolve(value.value)
    if isinstance(value, BaseException):
        raise value
    return value


async def resolve_async(value: Any) -> Any:
    if isinstance(value, Exactly):
        return value.value
    if isinstance(value, Deaf):
        await value.wait_async()
        return await resolve_async(value.value)
    if isinstance(value, After):
        await asyncio.sleep(value.seconds)
        return await resolve_async(value.value)
    if isinstance(value, Until):
        await until_async(value.condition, value.limit)
        return await resolve_async(value.value)
    if isinstance(value, BaseException):
        raise value
    return value


class ListSource:
    """A source that does not settle: it delivers batches, or plays a script of batches and exceptions."""

    def __init__(self, items: Iterable[Any] = (), *, script: Sequence[Any] | None = None) -> None:
        self.items = list(items)
        self.script = None if script is None else list(script)
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.on_fetch: Callable[[], Any] = lambda: None

    def _next(self, size: int, extra: dict[str, Any]) -> Any:
        self.asked.append((size, extra))
        self.on_fetch()
        if self.script is not None:
            item = self.script.pop(0) if self.script else []
            if isinstance(item, BaseException):
                raise item.with_traceback(None)  # it would grow each time
            return item
        batch, self.items = self.items[:size], self.items[size:]
        return batch

    def fetch_transactions(self, size: int, **extra: Any) -> Any:
        return resolve(self._next(size, extra))

    async def fetch_transactions_async(self, size: int, **extra: Any) -> Any:
        return await resolve_async(self._next(size, extra))


class SettlingSource(ListSource):
    """A source that records its settlements."""

    def __init__(
        self, items: Iterable[Any] = (), *, lease: float = 60.0, script: Sequence[Any] | None = None
    ) -> None:
        super().__init__(items, script=script)
        self.lease = lease
        self.reported: list[Settlement] = []
        self.calls: list[list[Settlement]] = []
        self.extended: list[list[str]] = []
        self.on_settle: Callable[[], Any] = lambda: None

    def settle_transactions(self, settlements: Sequence[Settlement]) -> None:
        resolve(self.on_settle())
        self.calls.append(list(settlements))
        self.reported.extend(settlements)

    async def settle_transactions_async(self, settlements: Sequence[Settlement]) -> None:
        await resolve_async(self.on_settle())
        self.calls.append(list(settlements))
        self.reported.extend(settlements)

    def extend_transactions(self, given: Sequence[Transaction]) -> None:
        self.extended.append([transaction.id for transaction in given])

    async def extend_transactions_async(self, given: Sequence[Transaction]) -> None:
        self.extended.append([transaction.id for transaction in given])

    def verdicts(self) -> dict[str, str]:
        return {settlement.transaction.id: settlement.verdict for settlement in self.reported}


class World:
    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.asynchronous = mode == "asyncio"
        self.calls: list[tuple[str, str]] = []
        """Every handler call, as (step, transaction id), in the order they began."""
        self.errors: list[tuple[str, TransactionException]] = []
        """The arguments of exception handlers."""

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None: ...

    # ── creating ────────────────────────────────────────────────────────────────────────────────────────

    def consumer(
        self,
        process: Behaviour = lambda _: None,
        *,
        success: Behaviour | None = None,
        exception: Behaviour | None = None,
        source: Any = None,
        settings: EngineSettings | None = None,
        clock: FakeClock | None = None,
        services: dict[str, Any] | None = None,
    ) -> Any:
        base: Any = AsyncConsumerTask if self.asynchronous else ConsumerTask
        made = self._class(
            base,
            process_transaction=self._noting("process", process),
            handle_transaction_success=success and self._noting("success", success),
            handle_transaction_exception=exception and self._noting("exception", exception),
        )
        task = made(connectors={"source": source or ListSource()}, services=services or {}, settings=settings)
        if clock is not None:
            task.clock = clock
        return task

    def producer(
        self,
        produce: Behaviour = lambda _: None,
        *,
        success: Behaviour | None = None,
        exception: Behaviour | None = None,
        settings: EngineSettings | None = None,
        clock: FakeClock | None = None,
        connectors: dict[str, Any] | None = None,
    ) -> Any:
        base: Any = AsyncProducerTask if self.asynchronous else ProducerTask
        made = self._class(
            base,
            produce_transaction=self._noting("produce", produce),
            handle_produce_success=success and self._noting("success", success),
            handle_produce_exception=exception and self._noting("exception", exception),
        )
        task = made(connectors=connectors or {}, settings=settings)
        if clock is not None:
            task.clock = clock
        return task

    @property
    def hybrid_base(self) -> Any:
        return AsyncHybridTask if self.asynchronous else HybridTask

    def handler(self, behaviour: Behaviour) -> Any:
        """A behavior as a method of this mode."""
        if self.asynchronous:

            async def method(task: Any, *arguments: Any) -> Any:
                return await resolve_async(behaviour(*arguments))
        else:

            def method(task: Any, *arguments: Any) -> Any:
                return resolve(behaviour(*arguments))

        return method

    def _noting(self, step: str, behaviour: Behaviour) -> Any:
        def noted(transaction: Transaction, *more: Any) -> Any:
            self.calls.append((step, transaction.id))
            if step == "exception":
                self.errors.append((transaction.id, more[0]))
            return behaviour(transaction, *more)

        return self.handler(noted)

    def _class(self, base: Any, **methods: Any) -> Any:
        return type(
            "Orders", (base,), {name: method for name, method in methods.items() if method is not None}
        )

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────

    def run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of a task, or await it on its own event loop."""
        if self.asynchronous:
            return asyncio.run(self._await(method, *arguments))
        return method(*arguments)

    async def _await(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await method(*arguments)

    def run_together(self, *calls: tuple[Any, ...]) -> list[Any]:
        """Make several calls at once, each `(method, *arguments)`: in threads, or as tasks of one event loop.

        Returns what each returned or raised.
        """
        if self.asynchronous:

            async def gathered() -> list[Any]:
                return await asyncio.gather(*(self._await(*call) for call in calls), return_exceptions=True)

            return asyncio.run(gathered())
        outcomes: list[Any] = [None] * len(calls)

        def carry(number: int, method: Callable[..., Any], *arguments: Any) -> None:
            try:
                outcomes[number] = method(*arguments)
            except BaseException as error:
                outcomes[number] = error

        threads = [threading.Thread(target=carry, args=(number, *call)) for number, call in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def consume(self, task: Any, policy: ConsumerPolicy | None = None) -> Report:
        report = self.run(task.consume_transactions, policy)
        assert isinstance(report, Report)
        return report

    def consume_then(self, task: Any, policy: ConsumerPolicy | None, then: Callable[[], Any]) -> Report:
        """Consume, and call `then` as soon as the call has ended, however it ended."""

        def call() -> Any:
            try:
                return task.consume_transactions(policy)
            finally:
                then()

        async def call_async() -> Any:
            try:
                return await task.consume_transactions(policy)
            finally:
                then()

        report = within(15, self.run, call_async if self.asynchronous else call)
        assert isinstance(report, Report)
        return report

    def consume_in_turn(self, task: Any, *policies: ConsumerPolicy) -> list[Any]:
        """Consume once per policy, one call after another; returns the reports, or the errors raised instead."""

        async def calls_async() -> list[Any]:
            ends: list[Any] = []
            for policy in policies:
                ends.extend(await asyncio.gather(task.consume_transactions(policy), return_exceptions=True))
            return ends

        def calls() -> list[Any]:
            return [self.run_together((task.consume_transactions, policy))[0] for policy in policies]

        ends = self.run(calls_async if self.asynchronous else calls)
        assert isinstance(ends, list)
        return ends

    def produce(
        self, task: Any, given: Iterable[Transaction], policy: ProducerPolicy | None = None
    ) -> Report:
        report = self.run(task.produce_transactions, given, policy)
        assert isinstance(report, Report)
        return report

    def steps_of(self, transaction_id: str) -> list[str]:
        return [step for step, called in self.calls if called == transaction_id]


def within(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns or raises; fails if it has not ended by then, and leaves it running."""
    ends: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            ends.append((call(*arguments), None))
        except BaseException as error:
            ends.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ends:
        raise AssertionError(f"it has not ended after {seconds} s")
    value, error = ends[0]
    if error is not None:
        raise error
    return value


def retry(attempts: int = 1, **more: Any) -> RetryPolicy:
    return RetryPolicy(max_attempts=attempts, **more)


def consuming(
    *,
    fetch: RetryPolicy | None = None,
    extra: dict[str, Any] | None = None,
    process: RetryPolicy | None = None,
    success: RetryPolicy | None = None,
    exception: RetryPolicy | None = None,
    batch: int = 10,
    concurrency: int = 1,
    **loop: Any,
) -> ConsumerPolicy:
    return ConsumerPolicy(
        loop=ConsumerLoopPolicy(
            batch=BatchPolicy(size=batch), concurrency=ConcurrencyPolicy(value=concurrency), **loop
        ),
        steps=ConsumerSteps(
            fetch=FetchPolicy(retry=fetch or RetryPolicy(), extra=extra or {}),
            process=ProcessPolicy(retry=process or RetryPolicy()),
            success=SuccessPolicy(retry=success or RetryPolicy()),
            exception=ExceptionPolicy(retry=exception or RetryPolicy()),
        ),
    )


def producing(
    *,
    produce: RetryPolicy | None = None,
    success: RetryPolicy | None = None,
    exception: RetryPolicy | None = None,
    batch: int = 10,
    concurrency: int = 1,
    **loop: Any,
) -> ProducerPolicy:
    return ProducerPolicy(
        loop=ProducerLoopPolicy(
            batch=BatchPolicy(size=batch), concurrency=ConcurrencyPolicy(value=concurrency), **loop
        ),
        steps=ProducerSteps(
            produce=ProducePolicy(retry=produce or RetryPolicy()),
            success=SuccessPolicy(retry=success or RetryPolicy()),
            exception=ExceptionPolicy(retry=exception or RetryPolicy()),
        ),
    )
