"""Threads that run out of time are asked to stop, by means that leave no lock behind; nested calls end with them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from onceward import HybridTask, Transaction, cancel_requested, on_cancel
from onceward.task.exceptions import AttemptInterrupted, ExceptionCategory, TransactionException
from onceward.task.mixins.utils import run_with_timeout
from onceward.task.ports_threads import BlockingPorts
from onceward.task.settings import EngineSettings
from onceward.task.slots import Slots
from onceward.task.work import OutcomeStatus
from onceward.testing import record
from tests.support.wait import until
from tests.support.world import (
    SHORT,
    Deaf,
    ListSource,
    SettlingSource,
    World,
    consuming,
    producing,
    retry,
    transactions,
    within,
)

pytestmark = [pytest.mark.timeout(90), pytest.mark.req("CE-43")]

TIMEOUT = ExceptionCategory.TIMEOUT
ONE = Transaction(id="t0", payload="p")
user_log = logging.getLogger("shop.orders")


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("onceward")]


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """The log's own thread stays."""
    before = len([name for name in names() if name != "onceward-log"])
    yield
    until(lambda: len([name for name in names() if name != "onceward-log"]) <= before)


# ── nothing is raised in a thread ───────────────────────────────────────────────────────────────────────


def test_a_handler_that_logs_under_a_short_limit_never_loses_the_lock_of_logging() -> None:
    """Every attempt logs from before its limit until after it."""
    world = World("threads")
    stream = open(os.devnull, "w")  # noqa: SIM115
    handler = logging.StreamHandler(stream)
    user_log.addHandler(handler)
    user_log.propagate = False
    limit = 0.004

    def process(_: Transaction) -> None:
        end = time.monotonic() + limit * 1.25
        time.sleep(limit / 2)
        while time.monotonic() < end:
            user_log.error("around the limit")

    task = world.consumer(process, source=ListSource(transactions(4000)))
    policy = consuming(concurrency=8, batch=100, process=retry(1, timeout=limit), mode="continuous")
    try:
        report = within(60, world.consume, task, policy)
    finally:
        user_log.removeHandler(handler)
        user_log.propagate = True
        stream.close()
    assert (report.processed, report.stuck) == (4000, 0)
    assert report.timed_out > 100
    assert handler.lock is not None
    assert handler.lock.acquire(timeout=5)


def test_nothing_reaches_a_thread_that_does_not_ask() -> None:
    world = World("threads")
    ends: list[str] = []

    def process(_: Transaction) -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        ends.append("ran to its end")

    task = world.consumer(process, source=ListSource([ONE]))
    report = within(30, world.consume, task, consuming(process=retry(2, timeout=0.1)))
    assert ends == ["ran to its end"] * 2
    assert (report.timed_out, report.stuck, report.failed_by_category[TIMEOUT]) == (2, 0, 1)


@pytest.mark.req("CE-44", "CE-47")
def test_a_handler_stuck_with_the_lock_of_logging_holds_up_nobody() -> None:
    """It waits inside a log handler, so every other line of the program waits for that handler's lock."""
    world = World("threads")
    let_go, begun = threading.Event(), threading.Event()

    class Remote(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            begun.set()
            let_go.wait(60)

    remote = Remote()

    def process(given: Transaction) -> None:
        if given.id == "t0":
            user_log.error("to a server that does not answer")
        raise OSError("down")

    task = world.consumer(
        process, source=SettlingSource(transactions(3)), settings=EngineSettings(stuck_grace=0.2)
    )
    logging.getLogger().addHandler(remote)
    try:
        report = within(30, world.consume, task, consuming(concurrency=2, process=retry(2, timeout=0.5)))
    finally:
        let_go.set()
        logging.getLogger().removeHandler(remote)
    assert begun.is_set()
    assert (report.failed, report.stuck) == (3, 1)


@pytest.mark.req("CE-44")
@pytest.mark.parametrize("wait", ["sleep", "lock", "socket"])
def test_a_wait_that_nobody_can_end_is_counted_as_stuck_and_given_up_on(
    wait: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World("threads")
    never = threading.Lock()
    never.acquire()
    ours, theirs = socket.socketpair()
    waits = {
        "sleep": lambda: time.sleep(3),
        "lock": lambda: never.acquire(timeout=10),
        "socket": lambda: ours.recv(1),
    }

    def free() -> None:
        if never.locked():
            never.release()
        theirs.close()

    task = world.consumer(
        lambda _: waits[wait](), source=ListSource([ONE]), settings=EngineSettings(stuck_grace=0.1)
    )
    with record() as recording:
        report = world.consume_then(task, consuming(process=retry(3, timeout=0.2)), free)
        assert recording.metric("onceward.slots.stuck") in (0, 1)
        assert recording.metric("onceward.attempts.timeouts") == 1
    assert (report.stuck, report.timed_out, report.failed_by_category[TIMEOUT]) == (1, 1, 1)
    assert "its slot is stuck" in caplog.text
    ours.close()


@pytest.mark.req("CE-36", "CE-30")
def test_the_lines_of_timeouts_and_stuck_attempts_say_whose_they_are(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()

    with record() as recording:
        task = world.consumer(
            lambda _: Deaf(let_go),
            exception=lambda *_: let_go.set(),
            source=ListSource([Transaction("deaf", 0)]),
            settings=EngineSettings(stuck_grace=0.1),
        )
        world.run(_consume_then_wait(world, task, lambda: "transaction deaf has ended" in caplog.text))
        traces = {f"{span.context.trace_id:032x}" for span in recording.spans() if span.context}
    mine = [each for each in caplog.records if vars(each).get("transaction_id") == "deaf"]
    lines = {
        part: [each for each in mine if part in each.getMessage()]
        for part in (
            "ran out of time (step limit)",
            "its slot is stuck",
            "has ended; its result is discarded",
        )
    }
    for part, found in lines.items():
        assert len(found) == 1, part
        shown = vars(found[0])
        assert (shown["task"], shown["step"]) == ("Orders", "process"), part
        assert shown["trace_id"] in traces, part
        assert shown["span_id"], part


def _consume_then_wait(world: World, task: Any, condition: Any) -> Any:
    policy = consuming(process=retry(1, timeout=0.2))

    async def asynchronously() -> None:
        await task.consume_transactions(policy)
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.01)

    def in_threads() -> None:
        task.consume_transactions(policy)
        until(condition)

    return asynchronously if world.asynchronous else in_threads


# ── cancellers ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_canceller_ends_what_the_attempt_waits_for() -> None:
    world = World("threads")
    calls: list[str] = []

    def process(_: Transaction) -> str:
        ours, theirs = socket.socketpair()
        with ours, theirs:

            def hang_up() -> None:
                calls.append(threading.current_thread().name)
                ours.shutdown(socket.SHUT_RDWR)

            with on_cancel(hang_up):
                return ours.recv(1).decode()

    task = world.consumer(process)
    ended = within(30, task.start_processing, ONE, consuming(process=retry(2, timeout=SHORT)))
    assert ended.status is OutcomeStatus.FAILED
    assert ended.error.category is TIMEOUT
    assert len(calls) == 2
    assert set(calls) == {"onceward-cancel"}


def test_a_canceller_is_called_only_while_its_block_runs() -> None:
    world = World("threads")
    called: list[str] = []

    def process(_: Transaction) -> None:
        with on_cancel(lambda: called.append("left")):
            pass
        with on_cancel(lambda: called.append("outer")), on_cancel(lambda: called.append("inner")):
            until(lambda: len(called) == 2)
        with pytest.raises(AttemptInterrupted), on_cancel(lambda: called.append("late")):
            called.append("never")

    within(30, world.consumer(process).start_processing, ONE, consuming(process=retry(1, timeout=0.2)))
    assert sorted(called) == ["inner", "outer"]


def test_leaving_the_block_waits_for_its_canceller() -> None:
    world = World("threads")
    order: list[str] = []
    begun = threading.Event()

    def cancel() -> None:
        begun.set()
        time.sleep(0.3)
        order.append("canceled")

    def process(_: Transaction) -> None:
        with on_cancel(cancel):
            assert begun.wait(30)
        order.append("left")

    within(30, world.consumer(process).start_processing, ONE, consuming(process=retry(1, timeout=0.2)))
    assert order == ["canceled", "left"]


@pytest.mark.parametrize("error", [OSError("x"), SystemExit(), AttemptInterrupted()], ids=repr)
def test_a_canceller_that_raises_stops_no_other(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    world = World("threads")
    set_free = threading.Event()

    def fail() -> None:
        raise error

    def process(_: Transaction) -> None:
        with on_cancel(fail), on_cancel(set_free.set), on_cancel(fail):
            set_free.wait(30)

    task = world.consumer(process)
    ended = within(20, task.start_processing, ONE, consuming(process=retry(1, timeout=0.2)))
    assert ended.error.category is TIMEOUT
    assert "a canceller failed" in caplog.text


def test_a_canceller_that_hangs_makes_its_attempt_stuck_and_delays_no_other() -> None:
    world = World("threads")
    begun, never = threading.Event(), threading.Event()

    def process(given: Transaction) -> None:
        if given.id == "t0":
            with on_cancel(lambda: (begun.set(), never.wait(30))):
                assert begun.wait(30)
        else:
            until(cancel_requested)

    task = world.consumer(
        process, source=ListSource(transactions(3)), settings=EngineSettings(stuck_grace=0.2)
    )
    report = world.consume_then(task, consuming(concurrency=3, process=retry(1, timeout=0.2)), never.set)
    assert (report.failed_by_category[TIMEOUT], report.stuck) == (3, 1)


@pytest.mark.parametrize("step", ["success", "exception"])
def test_handlers_and_fetches_have_a_token_as_well(step: str) -> None:
    world = World("threads")
    seen: list[str] = []

    def wait(where: str) -> None:
        stop = threading.Event()
        with on_cancel(stop.set):
            assert stop.wait(30)
        seen.append(where)

    class Source(ListSource):
        def fetch_transactions(self, size: int, **extra: Any) -> Any:
            if not self.asked:
                self.asked.append((size, extra))
                wait("fetch")
                return []
            return super().fetch_transactions(size, **extra)

    class Settling(Source, SettlingSource):
        def settle_transactions(self, settlements: Any) -> None:
            if "settle" not in seen:
                wait("settle")
            super().settle_transactions(settlements)

    def fail(_: Transaction) -> None:
        raise OSError

    handlers: dict[str, Any] = {step: lambda *_: wait(step)}
    task = world.consumer(fail if step == "exception" else lambda _: None, source=Settling([ONE]), **handlers)
    limit = retry(2, timeout=0.2)
    within(30, world.consume, task, consuming(fetch=limit, success=retry(1, timeout=0.2), exception=limit))
    assert "fetch" in seen
    assert "settle" in seen
    assert step in seen


def test_what_a_fetch_delivers_too_late_goes_back_to_its_source(world: World) -> None:
    class Slow(SettlingSource):
        def fetch_transactions(self, size: int, **extra: Any) -> Any:
            if not self.asked:
                until(cancel_requested)
            return super().fetch_transactions(size, **extra)

        async def fetch_transactions_async(self, size: int, **extra: Any) -> Any:
            if not self.asked:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(30)
            return await super().fetch_transactions_async(size, **extra)

    source = Slow(transactions(4))
    report = within(
        30, world.consume, world.consumer(source=source), consuming(batch=2, fetch=retry(2, timeout=0.3))
    )
    assert report.succeeded == 2
    assert source.verdicts() == {"t0": "returned", "t1": "returned", "t2": "done", "t3": "done"}


def test_producers_have_a_token_as_well() -> None:
    world = World("threads")
    task = world.producer(lambda _: until(cancel_requested))
    report = within(30, world.produce, task, transactions(2), producing(produce=retry(2, timeout=0.2)))
    assert (report.failed_by_category[TIMEOUT], report.timed_out) == (2, 4)


def test_outside_an_engine_a_canceller_is_never_called() -> None:
    with on_cancel(lambda: pytest.fail("nobody asked")):
        assert not cancel_requested()


def test_a_thread_of_the_users_own_is_asked_to_stop_with_its_attempt() -> None:
    world = World("threads")
    asked = threading.Event()

    def inner() -> None:
        until(cancel_requested)
        asked.set()

    def process(_: Transaction) -> None:
        run_with_timeout(inner, 30)

    ended = within(
        20, world.consumer(process).start_processing, ONE, consuming(process=retry(1, timeout=0.2))
    )
    assert ended.error.category is TIMEOUT
    assert asked.is_set()


def test_what_an_attempt_leaves_running_is_no_part_of_it(world: World) -> None:
    """A pool starts its own task or thread when it is first used, in the context of its first user."""
    ends: list[str] = []
    over = threading.Event()

    def in_background() -> None:
        over.wait(30)
        with on_cancel(lambda: ends.append("canceled")):
            ends.append("worked")

    async def in_background_async() -> None:
        while not over.is_set():
            await asyncio.sleep(0.005)
        in_background()

    def process(task: Any, given: Transaction) -> None:
        context = contextvars.copy_context()
        threads.append(threading.Thread(target=context.run, args=(in_background,)))
        threads[0].start()
        until(cancel_requested)

    async def process_async(task: Any, given: Transaction) -> None:
        tasks.append(asyncio.create_task(in_background_async()))
        await asyncio.sleep(30)

    threads: list[threading.Thread] = []
    tasks: list[asyncio.Task[None]] = []
    task = world.consumer()
    type(task).process_transaction = process_async if world.asynchronous else process
    policy = consuming(process=retry(1, timeout=0.2))

    async def run_async() -> None:
        await task.start_processing(ONE, policy)
        over.set()
        await tasks[0]

    def run() -> None:
        task.start_processing(ONE, policy)
        over.set()
        threads[0].join(30)

    within(40, world.run, run_async if world.asynchronous else run)
    assert ends == ["worked"]


def test_an_interruption_that_is_nobodys_is_a_failure_like_any_other(world: World) -> None:
    def process(_: Transaction) -> None:
        raise AttemptInterrupted

    task = world.consumer(process, source=ListSource(transactions(2)))
    assert within(20, world.consume, task, consuming(process=retry(2))).failed == 2


# ── nested calls ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-45")
@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize(
    "settings", [EngineSettings(), EngineSettings(interrupt="raise")], ids=["cancel", "raise"]
)
@pytest.mark.parametrize("inner_limit", [None, 30.0])
def test_a_nested_call_ends_with_the_attempt_that_makes_it(
    settings: EngineSettings, inner_limit: float | None
) -> None:
    """Every message forks into ten, of which one is produced when the time is up."""
    produced: list[str] = []
    ends: list[str] = []

    class Fork(HybridTask):
        def process_transaction(self, transaction: Transaction, /, *_: Any, **__: Any) -> None:
            try:
                self.produce_transactions(
                    [Transaction(id=f"{transaction.id}.{number}") for number in range(10)],
                    producing(produce=retry(1, timeout=inner_limit)),
                )
            except BaseException as error:
                ends.append(type(error).__name__)
                raise

        def produce_transaction(self, transaction: Transaction) -> None:
            produced.append(transaction.id)
            until(cancel_requested)

        def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> None:
            ends.append(exc.category)

    task = Fork({"source": ListSource(transactions(3))}, settings=settings)
    report = within(40, task.consume_transactions, consuming(concurrency=3, process=retry(2, timeout=0.5)))
    assert (report.failed_by_category[TIMEOUT], report.stuck) == (3, 0)
    assert sorted(produced) == [f"t{number}.0" for number in range(3) for _ in range(2)]
    assert sorted(ends) == ["AttemptInterrupted"] * 6 + ["TIMEOUT"] * 3


@pytest.mark.req("CE-45")
@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize(
    "broken_off", [(Slots, "dismiss"), (BlockingPorts, "close")], ids=["dismiss", "close"]
)
@pytest.mark.parametrize("error", [AttemptInterrupted, KeyboardInterrupt])
def test_an_interrupt_while_a_call_ends_its_threads_leaves_none(
    broken_off: tuple[type, str], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception from outside can arrive at any bytecode, also there."""
    kind, name = broken_off
    real = getattr(kind, name)
    calls: list[str] = []

    def interrupted(*arguments: Any, **options: Any) -> None:
        calls.append(name)
        if len(calls) == 1:
            raise error
        real(*arguments, **options)

    monkeypatch.setattr(kind, name, interrupted)
    world = World("threads")
    task = world.producer()
    with contextlib.suppress(error):
        within(20, world.produce, task, transactions(3), producing(produce=retry(1, timeout=30.0)))
    assert calls == [name] * 2


@pytest.mark.req("CE-45")
@pytest.mark.usefixtures("no_thread_is_left")
def test_a_nested_call_in_asyncio_inside_a_thread_ends_as_well() -> None:
    world, inside = World("threads"), World("asyncio")
    produced: list[str] = []

    async def produce(task: Any, given: Transaction) -> None:
        produced.append(given.id)
        await asyncio.sleep(60)

    inner = inside.producer()
    type(inner).produce_transaction = produce
    task = world.consumer(lambda _: asyncio.run(inner.produce_transactions(transactions(5))))
    ended = within(30, task.start_processing, ONE, consuming(process=retry(2, timeout=0.3)))
    assert ended.error.category is TIMEOUT
    assert produced == ["t0", "t0"]


def test_a_nested_call_in_asyncio_ends_with_its_attempt() -> None:
    world = World("asyncio")
    produced: list[str] = []

    async def produce(task: Any, given: Transaction) -> None:
        produced.append(given.id)
        await asyncio.sleep(60)

    inner = world.producer()
    type(inner).produce_transaction = produce

    async def process(task: Any, given: Transaction) -> None:
        await inner.produce_transactions(transactions(5))

    task = world.consumer()
    type(task).process_transaction = process
    ended = within(30, world.run, task.start_processing, ONE, consuming(process=retry(2, timeout=0.3)))
    assert ended.error.category is TIMEOUT
    assert produced == ["t0", "t0"]


@pytest.mark.req("CE-45")
@pytest.mark.usefixtures("no_thread_is_left")
def test_a_nested_call_in_a_nested_call_ends_with_the_outermost_attempt() -> None:
    world = World("threads")
    innermost = world.producer(lambda _: until(cancel_requested))
    middle = world.producer(lambda _: world.produce(innermost, transactions(3)))
    task = world.consumer(lambda _: world.produce(middle, transactions(3)))
    ended = within(30, task.start_processing, ONE, consuming(process=retry(1, timeout=0.3)))
    assert ended.error.category is TIMEOUT
    assert world.steps_of("t0").count("produce") == 2


def test_a_nested_call_that_is_begun_too_late_does_not_begin() -> None:
    world = World("threads")
    inner = world.producer()

    def process(_: Transaction) -> None:
        until(cancel_requested)
        world.produce(inner, transactions(3))

    within(30, world.consumer(process).start_processing, ONE, consuming(process=retry(1, timeout=0.2)))
    assert [step for step, _ in world.calls] == ["process"]


def test_a_nested_call_that_is_hurried_with_its_run_is_cut_off() -> None:
    world = World("threads")
    inner = world.producer(lambda _: until(cancel_requested))
    task = world.consumer(
        lambda _: world.produce(inner, transactions(5)), source=SettlingSource(transactions(1))
    )
    task.interruptible = True

    def hurry() -> None:
        until(lambda: ("produce", "t0") in world.calls)
        task.stop()
        task.hurry()

    threading.Thread(target=hurry, daemon=True).start()
    report = within(30, world.consume, task, consuming())
    assert report.abandoned == 1
    assert len(world.steps_of("t1")) == 0


# ── forks and memory ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-18")
def test_ids_in_flight_are_not_in_flight_in_a_forked_child() -> None:
    world = World("threads")
    let_go, begun = threading.Event(), threading.Event()

    def process(_: Transaction) -> Any:
        begun.set()
        return Deaf(let_go, limit=60)

    task = world.consumer(process)
    parent = threading.Thread(target=task.start_processing, args=(ONE,), daemon=True)
    parent.start()
    assert begun.wait(20)
    child = os.fork()
    if child == 0:
        let_go.set()
        code = 1
        try:
            ended = within(20, task.start_processing, ONE)
            code = 0 if ended.status is OutcomeStatus.SUCCEEDED else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    let_go.set()
    parent.join(20)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_can_log_and_have_timeouts() -> None:
    world = World("threads")
    failing = world.consumer(lambda _: until(cancel_requested), source=ListSource(transactions(1)))
    policy = consuming(process=retry(1, timeout=0.2))
    within(20, world.consume, failing, policy)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            logging.disable(logging.NOTSET)
            task = world.consumer(lambda _: until(cancel_requested), source=ListSource(transactions(1)))
            code = 0 if within(20, world.consume, task, policy).timed_out == 1 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_threads_of_stuck_attempts_are_forgotten_when_they_have_ended() -> None:
    world = World("threads")
    sizes: list[int] = []
    ports = BlockingPorts(world.consumer().clock, 1.0, lambda *_: None)
    for _ in range(40):
        batch = [threading.Event() for _ in range(10)]
        for event in batch:
            ports.start(event.set)
        assert all(event.wait(10) for event in batch)
        sizes.append(sum(isinstance(each, threading.Thread) for each in vars(ports)["_threads"]))
    assert max(sizes) < 200
