"""Workers in asyncio: nothing of one transaction reaches the next, others get their turn, none outlives its call."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from onceward import AsyncConsumerTask, AsyncProducerTask, Transaction
from onceward.task.exceptions import Postponed, TransactionException
from onceward.task.ports_asyncio import TURN
from onceward.task.report import Report, StopReason
from tests.support.wait import until_async
from tests.support.world import (
    SHORT,
    ListSource,
    SettlingSource,
    consuming,
    producing,
    retry,
    transactions,
    within,
)

pytestmark = pytest.mark.timeout(120)

Handler = Callable[[Transaction], Awaitable[Any]]
ROLES = pytest.mark.parametrize("role", ["consumer", "producer"])


def call(
    role: str,
    handler: Handler,
    given: list[Transaction],
    *,
    source: Any = None,
    limit: Any = None,
    success: bool = False,
    **loop: Any,
) -> Awaitable[Report]:
    """A call whose main step is this handler."""

    async def main(_: Any, transaction: Transaction) -> Any:
        return await handler(transaction)

    async def succeed(_: Any, *arguments: Any) -> None: ...

    names = ("handle_transaction_success", "handle_produce_success") if success else ()
    more = dict.fromkeys(names, succeed)
    if role == "consumer":
        consumer: Any = type("Orders", (AsyncConsumerTask,), {"process_transaction": main, **more})
        task = consumer({"source": source or ListSource(given)})
        return task.consume_transactions(consuming(process=limit, **loop))  # type: ignore[no-any-return]
    producer: Any = type("Orders", (AsyncProducerTask,), {"produce_transaction": main, **more})
    return producer({}).produce_transactions(given, producing(produce=limit, **loop))  # type: ignore[no-any-return]


def run(*arguments: Any, **more: Any) -> Report:
    async def main() -> Report:
        return await call(*arguments, **more)

    report = within(60, asyncio.run, main())
    assert isinstance(report, Report)
    return report


# ── a clean slate ───────────────────────────────────────────────────────────────────────────────────────


async def leave_a_count() -> None:
    """As TaskGroup of 3.11 and old versions of async_timeout: cancel the task, catch that, and forget to uncancel."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(30)


async def fail_in_a_group() -> None:
    async def fail() -> None:
        raise OSError("a child failed")

    with contextlib.suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await asyncio.sleep(30)


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def fail_in_a_group_that_is_ending() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError("a child failed")

    with contextlib.suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())


DIRT = pytest.mark.parametrize(
    "soil", [leave_a_count, fail_in_a_group, fail_in_a_group_that_is_ending, cancel_itself]
)


@pytest.mark.req("CE-20", "CE-36")
@ROLES
@DIRT
@pytest.mark.parametrize("limited", [False, True])
def test_what_one_transaction_does_to_its_task_does_not_reach_the_next(
    role: str, soil: Callable[[], Awaitable[None]], limited: bool
) -> None:
    async def handler(transaction: Transaction) -> None:
        if transaction.payload % 2 == 0:
            await soil()
        else:
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0.001)

    report = run(role, handler, transactions(6), limit=retry(timeout=30.0 if limited else None))
    assert (report.succeeded, report.failed) == (6, 0)


@pytest.mark.req("CE-20")
@ROLES
@DIRT
def test_the_next_step_timeout_is_a_timeout(role: str, soil: Callable[[], Awaitable[None]]) -> None:
    async def handler(transaction: Transaction) -> None:
        if transaction.payload % 2 == 0:
            await soil()
        else:
            await asyncio.sleep(30)

    report = run(role, handler, transactions(4), limit=retry(timeout=SHORT))
    assert (report.succeeded, report.failed, report.timed_out) == (2, 2, 2)


@pytest.mark.req("CE-20")
@ROLES
def test_a_timeout_of_an_attempt_that_soiled_its_own_task_is_a_timeout(role: str) -> None:
    tries: list[str] = []

    async def handler(transaction: Transaction) -> None:
        tries.append(transaction.id)
        await leave_a_count()
        if len(tries) == 1:
            await asyncio.sleep(30)

    report = run(role, handler, transactions(1), limit=retry(2, timeout=SHORT))
    assert (report.succeeded, report.timed_out, report.retries) == (1, 1, 1)


@pytest.mark.req("CE-06")
@ROLES
def test_a_task_that_cancels_itself_before_a_backoff_is_tried_again(role: str) -> None:
    tries: list[str] = []

    async def handler(transaction: Transaction) -> None:
        tries.append(transaction.id)
        if len(tries) == 1:
            await cancel_itself()
            raise OSError

    report = run(role, handler, transactions(1), limit=retry(2, backoff=0.01))
    assert (report.succeeded, report.retries) == (1, 1)


@pytest.mark.req("CE-12")
def test_a_connector_that_soils_the_task_of_the_loop_harms_nothing() -> None:
    class Soiling(SettlingSource):
        async def fetch_transactions_async(self, size: int, **extra: Any) -> Any:
            await leave_a_count()
            await cancel_itself()
            return await super().fetch_transactions_async(size, **extra)

    async def handler(_: Transaction) -> None:
        await asyncio.sleep(0)

    source = Soiling(transactions(5))
    report = run("consumer", handler, [], source=source, batch=1)
    assert (report.succeeded, len(source.reported)) == (5, 5)


@pytest.mark.req("CE-36")
@ROLES
@DIRT
@pytest.mark.parametrize("limit", [None, 30.0])
def test_a_real_cancellation_still_cancels(
    role: str, soil: Callable[[], Awaitable[None]], limit: float | None
) -> None:
    seen: list[str] = []

    async def handler(transaction: Transaction) -> None:
        if transaction.payload < 2:
            await soil()
            return
        try:
            seen.append("begun")
            await asyncio.sleep(30)
        finally:
            seen.append("ended")

    async def main() -> None:
        running = asyncio.ensure_future(call(role, handler, transactions(9), limit=retry(timeout=limit)))
        await until_async(lambda: seen)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert seen == ["begun", "ended"]

    within(60, asyncio.run, main())


@pytest.mark.req("CE-36")
@ROLES
def test_a_cancellation_of_every_task_there_is_cancels(role: str) -> None:
    """As `asyncio.run` does in the end, and frameworks when they shut down."""
    seen: list[str] = []

    async def handler(_: Transaction) -> None:
        seen.append("begun")
        await asyncio.sleep(30)

    async def main() -> None:
        me = asyncio.current_task()
        running = asyncio.ensure_future(call(role, handler, transactions(4), concurrency=2))
        await until_async(lambda: len(seen) == 2)
        for task in asyncio.all_tasks() - {me}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(seen) == 2

    within(60, asyncio.run, main())


@pytest.mark.req("CE-20")
@ROLES
def test_a_call_whose_own_task_has_a_count_left_over_works(role: str) -> None:
    async def handler(transaction: Transaction) -> None:
        if transaction.payload == 0:
            raise asyncio.CancelledError
        await asyncio.sleep(30 if transaction.payload == 1 else 0)

    async def main() -> Report:
        await leave_a_count()
        return await call(role, handler, transactions(3), limit=retry(timeout=SHORT))

    report = within(60, asyncio.run, main())
    assert (report.succeeded, report.failed, report.timed_out) == (1, 2, 1)


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")


@pytest.mark.req("PE-19")
@ROLES
@pytest.mark.parametrize("waits", [False, True])
def test_a_context_variable_of_one_transaction_is_unknown_to_the_next(role: str, waits: bool) -> None:
    seen: list[str] = []

    async def handler(transaction: Transaction) -> None:
        seen.append(VARIABLE.get())
        VARIABLE.set(transaction.id)
        if waits:
            await asyncio.sleep(0)
            assert VARIABLE.get() == transaction.id

    run(role, handler, transactions(6))
    assert seen == ["clean"] * 6


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────────


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.usual("0-1-True", "0.002-25-False")
@pytest.mark.req("CE-14")
@ROLES
@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.long), 50])
@pytest.mark.parametrize(("attempts", "success"), [(1, False), (1, True), (25, False)])
@pytest.mark.parametrize("pause", [0, TURN])
def test_handlers_that_never_wait_let_the_event_loop_have_its_turn(
    role: str, concurrency: int, attempts: int, success: bool, pause: float
) -> None:
    since_the_last_beat: list[int] = [0]

    async def handler(_: Transaction) -> None:
        since_the_last_beat[-1] += 1
        compute(2 * TURN)
        if attempts > 1:
            raise OSError

    async def beat() -> None:
        while True:
            await asyncio.sleep(pause)
            since_the_last_beat.append(0)

    async def main() -> None:
        heart = asyncio.ensure_future(beat())
        given = transactions(50 // attempts)
        limit = retry(attempts)
        await call(role, handler, given, limit=limit, success=success, batch=50, concurrency=concurrency)
        heart.cancel()

    within(60, asyncio.run, main())
    assert sum(since_the_last_beat) == 50
    assert max(since_the_last_beat) <= 2


@pytest.mark.req("CE-14")
def test_a_life_that_is_postponed_without_a_delay_does_not_hold_the_event_loop() -> None:
    beats: list[float] = []

    async def handler(_: Transaction) -> None:
        if len(beats) < 3:
            raise Postponed("not yet", delay=0)

    async def main() -> None:
        async def beat() -> None:
            while True:
                await asyncio.sleep(0)
                beats.append(time.monotonic())

        heart = asyncio.ensure_future(beat())
        await call("producer", handler, transactions(1))
        heart.cancel()

    within(60, asyncio.run, main())


# ── nothing outlives the call ───────────────────────────────────────────────────────────────────────────


async def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


async def quick(_: Transaction) -> None: ...


async def slow(_: Transaction) -> None:
    await asyncio.sleep(0.01)


@pytest.mark.req("CE-31")
@ROLES
@pytest.mark.parametrize("handler", [quick, slow])
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_no_task_is_left_when_the_call_returns(role: str, handler: Handler, count: int) -> None:
    async def main() -> None:
        report = await call(role, handler, transactions(count), batch=5000, concurrency=5000)
        assert report.succeeded == count
        assert await others() == set()

    within(60, asyncio.run, main())


@pytest.mark.req("CE-31")
@ROLES
def test_handlers_that_never_wait_need_few_workers(role: str) -> None:
    most = 0

    async def handler(_: Transaction) -> None:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))

    run(role, handler, transactions(2000), batch=2000, concurrency=2000)
    assert most < 10


@pytest.mark.req("CE-14")
@ROLES
def test_handlers_that_wait_get_as_many_workers_as_allowed(role: str) -> None:
    now = most = 0

    async def handler(_: Transaction) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1

    run(role, handler, transactions(300), batch=300, concurrency=100)
    assert most == 100


ENDS: dict[str, Any] = {
    "exit": (SystemExit(), SystemExit),
    "failure": (TransactionException("no"), None),
    "loop timeout": (None, TimeoutError),
    "cancellation": (None, asyncio.CancelledError),
}


@pytest.mark.req("CE-31", "CE-36")
@ROLES
@pytest.mark.parametrize("end", ENDS)
def test_no_task_is_left_however_the_call_ends(role: str, end: str) -> None:
    raised, expected = ENDS[end]
    begun: list[str] = []

    async def handler(transaction: Transaction) -> None:
        begun.append(transaction.id)
        await asyncio.sleep(0.01)
        if transaction.payload == 3 and raised is not None:
            raise raised
        await asyncio.sleep(0.01 if raised is not None else 30)

    async def main() -> None:
        timeout = SHORT if end == "loop timeout" else None
        running = call(role, handler, transactions(40), batch=40, concurrency=20, timeout=timeout)
        if end == "cancellation":
            running = asyncio.ensure_future(running)
            await until_async(lambda: len(begun) == 20)
            running.cancel()
        with contextlib.nullcontext() if expected is None else pytest.raises(expected):
            await running
        assert await others() == set()

    within(60, asyncio.run, main())


@pytest.mark.req("CE-31")
def test_no_task_is_left_when_the_source_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        source = ListSource(script=[transactions(50), OSError("gone")])
        with pytest.raises(Exception, match="gone"):
            await call("consumer", slow, [], source=source, batch=50, concurrency=50)
        assert await others() == set()

    within(60, asyncio.run, main())
    gc.collect()
    assert "was destroyed" not in caplog.text


@pytest.mark.req("CE-31")
def test_a_stopped_call_leaves_no_task() -> None:
    class Stopping(AsyncConsumerTask):
        async def process_transaction(self, transaction: Transaction) -> None:
            self.stop()
            await asyncio.sleep(0.01)

    async def main() -> None:
        source = SettlingSource(transactions(100))
        report = await Stopping({"source": source}).consume_transactions(consuming(batch=100, concurrency=10))
        assert report.stop_reason is StopReason.STOPPED
        assert await others() == set()

    within(60, asyncio.run, main())


def test_a_call_that_is_closed_leaves_no_task() -> None:
    async def main() -> None:
        running: Any = call("consumer", slow, transactions(2))
        running.send(None)
        running.close()
        await until_async(lambda: len(asyncio.all_tasks()) == 1)

    within(60, asyncio.run, main())


# ── at once ─────────────────────────────────────────────────────────────────────────────────────────────


class OneByOne(SettlingSource):
    """Delivers a message when the worker has long been idle again."""

    def __init__(self, given: list[Transaction]) -> None:
        super().__init__(given)
        self.delivered_at = 0
        self.turns = 0

    async def fetch_transactions_async(self, batch_size: int, /, **_: Any) -> list[Transaction]:
        await asyncio.sleep(5 * TURN)
        fetched = list(await super().fetch_transactions_async(1))
        self.delivered_at = self.turns
        return fetched

    def count_turns(self) -> None:
        self.turns += 1
        asyncio.get_running_loop().call_soon(self.count_turns)


def test_a_worker_that_was_idle_begins_in_the_next_turn_of_the_event_loop() -> None:
    source = OneByOne(transactions(3))
    waited: list[int] = []

    async def note(_: Transaction) -> None:
        waited.append(source.turns - source.delivered_at)

    async def main() -> None:
        source.count_turns()
        await call("consumer", note, [], source=source)

    within(60, asyncio.run, main())
    assert waited[1:] == [1, 1]
