"""Importing and using onceward changes nothing about the logging of the rest of the program."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from onceward.telemetry import JsonLines, LogFields
from onceward.telemetry.log_thread import log_thread
from onceward.telemetry.logs import FIELDS, start_logging
from tests.support.world import ListSource, World, business, consuming, results, retry, transactions, within

user_log = logging.getLogger("shop.orders")

CONSUME = """
        from onceward import ConsumerTask, Transaction

        class Source:
            batches = [[Transaction(id=str(n)) for n in range(3)], []]
            def fetch_transactions(self, size):
                return self.batches.pop(0)

        class Task(ConsumerTask):
            def process_transaction(self, transaction):
                logging.getLogger("shop").warning("mine")
                if transaction.id == "1":
                    raise OSError("down")

        report = Task({"source": Source()}).consume_transactions()
        print(report.succeeded, report.failed)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """In another process: what a library changes when it is imported is seen only once."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def handling(handler: logging.Handler, *names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names or ("",)]
    for each in loggers:
        each.addHandler(handler)
    try:
        yield
    finally:
        for each in loggers:
            each.removeHandler(handler)


@pytest.mark.req("CE-46")
def test_importing_leaves_the_record_factory_and_the_logger_class_alone() -> None:
    done = run("""
        import logging
        before = (logging.getLogRecordFactory(), logging.getLoggerClass(), list(logging.root.handlers))
        import onceward, onceward.telemetry, onceward.task.mixins.consumer, onceward.app, onceward.run.worker
        import onceward.inbox, onceward.db, onceward.queue, onceward.connectors
        onceward.telemetry.setup
        assert before == (logging.getLogRecordFactory(), logging.getLoggerClass(), list(logging.root.handlers))
        for name in ("transaction_id", "task", "step", "attempt", "trace_id", "span_id"):
            assert not hasattr(logging.makeLogRecord({}), name)
            logging.getLogger("x").warning("fine", extra={name: 1})
    """)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


@pytest.mark.req("CE-46")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_record_factory_of_the_user_works_with_every_line(when: str) -> None:
    """The logging cookbook's: it wraps the one it finds, and sets fields whose names we use as well."""
    factory = """
        old = logging.getLogRecordFactory()
        def make(*args, **kwargs):
            record = old(*args, **kwargs)
            record.custom = record.task = record.trace_id = "cookbook"
            return record
        logging.setLogRecordFactory(make)
    """
    first, second = (
        (factory, "        import onceward") if when == "before" else ("        import onceward", factory)
    )
    done = run(
        "        import logging\n"
        + first
        + "\n"
        + second
        + '\n        logging.basicConfig(format="%(custom)s %(name)s %(message)s")\n'
        + CONSUME
        + "\n        Source.batches = [[Transaction(id='9')], []]; Task({'source': Source()}).consume_transactions()\n"
    )
    assert done.stdout == "2 1\n", done.stderr
    assert "Error" not in done.stderr.replace("OSError", "")
    assert done.stderr.count("cookbook shop mine") == 4
    assert "cookbook onceward.engine process gave up" in done.stderr


@pytest.mark.req("CE-46")
@pytest.mark.parametrize("when", ["before", "after"])
def test_opentelemetrys_own_way_to_factories_works_too(when: str) -> None:
    """What `LoggingInstrumentor().instrument(set_logging_format=True)` does."""
    instrument = """
        old_factory = logging.getLogRecordFactory()
        def record_factory(*args, **kwargs):
            record = old_factory(*args, **kwargs)
            record.otelSpanID = record.otelTraceID = "0"
            record.otelServiceName = ""
            record.otelTraceSampled = False
            return record
        logging.setLogRecordFactory(record_factory)
        logging.basicConfig(format="%(levelname)s [trace_id=%(otelTraceID)s] - %(message)s")
    """
    importing = "        import onceward, onceward.task.call"
    first, second = (instrument, importing) if when == "before" else (importing, instrument)
    done = run("        import logging\n" + first + "\n" + second + "\n" + CONSUME)
    assert done.stdout == "2 1\n", done.stderr
    assert "Recursion" not in done.stderr
    assert "WARNING [trace_id=0] - mine" in done.stderr


@pytest.mark.req("CE-46")
def test_a_handler_may_log_with_any_extra(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(fields := LogFields())
    theirs = {name: f"user's {name}" for name in FIELDS}
    task = world.consumer(
        lambda _: user_log.warning("here", extra={**theirs, "order": 7}), source=ListSource(transactions(1))
    )
    try:
        assert world.consume(task).succeeded == 1
    finally:
        caplog.handler.removeFilter(fields)
    (line,) = [each for each in caplog.records if each.name == "shop.orders"]
    assert {name: vars(line)[name] for name in FIELDS} == theirs


@pytest.mark.req("CE-46")
def test_logging_refuses_what_it_always_refused() -> None:
    with pytest.raises(KeyError, match="Attempt to overwrite"):
        user_log.warning("here", extra={"message": "mine"})


def json_lines(*handlers_filters: logging.Filter) -> tuple[io.StringIO, logging.Handler]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for each in handlers_filters:
        handler.addFilter(each)
    return stream, handler


class Broken:
    def __str__(self) -> str:
        raise ValueError("cannot be shown")

    __repr__ = __str__


@pytest.mark.req("CE-46")
def test_json_lines_carry_the_fields_and_what_the_user_adds(world: World) -> None:
    stream, handler = json_lines(LogFields())
    circular: list[Any] = []
    circular.append(circular)
    extra = {"order": 7, "tags": ["a"], "level": "gold", "alert": "first", "odd": circular, "bad": Broken()}
    task = world.consumer(lambda _: user_log.warning("here", extra=extra), source=ListSource(transactions(1)))
    with handling(handler, "shop.orders"):
        world.consume(task)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert {**line, "time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "shop.orders",
        "message": "here",
        "transaction_id": "t0",
        "task": "Orders",
        "step": "process",
        "attempt": 0,
        "trace_id": "",
        "span_id": "",
        "order": 7,
        "tags": ["a"],
        "alert": "first",
        "extra.level": "gold",
        "odd": "<list>",
        "bad": "<Broken>",
    }


@pytest.mark.req("CE-46")
def test_the_json_lines_of_a_run_carry_extras_and_alerts_and_the_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(logging, "_warnings_showwarning", None)
    start_logging("json", "info", 3)
    try:
        user_log.warning("here", extra={"alert": "poison", "order": 7, "task": "mine"})
    finally:
        logging.captureWarnings(False)
    line = json.loads(capsys.readouterr().err)
    assert (line["worker"], line["alert"], line["order"], line["task"]) == (3, "poison", 7, "mine")
    assert "step" not in line


# ── nothing that is logged decides whether a call ends ──────────────────────────────────────────────────


class Raising(logging.Filter):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def filter(self, record: logging.LogRecord) -> bool:
        raise self._error


class BlockingHandler(logging.Handler):
    """Holds its lock until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.let_go.wait(60)
        self.seen.append(record.getMessage())


@pytest.mark.req("CE-47")
@pytest.mark.parametrize(
    "error", [RuntimeError(), SystemExit(1), GeneratorExit(), StopIteration(), RecursionError()], ids=repr
)
@pytest.mark.parametrize("where", ["logger", "handler"])
def test_a_filter_that_raises_changes_no_outcome(world: World, error: BaseException, where: str) -> None:
    """A failure, a retry, a refusal and a timeout, each of which is logged."""
    handler = logging.NullHandler()
    owner: Any = handler if where == "handler" else logging.getLogger("onceward.engine")
    task = world.consumer(
        results(OSError("a"), "r", business(), OSError("b"), OSError("c")),
        exception=results(OSError("d")),
        source=ListSource(transactions(3)),
    )
    owner.addFilter(raising := Raising(error))
    try:
        with handling(handler, "onceward"):
            report = within(20, world.consume, task, consuming(process=retry(2)))
    finally:
        owner.removeFilter(raising)
    assert (report.succeeded, report.failed, report.retries) == (1, 2, 2)


class OddLogger(logging.Logger):
    def getEffectiveLevel(self) -> int:
        raise RuntimeError


@pytest.mark.req("CE-47")
def test_a_logger_class_that_raises_changes_no_outcome(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("onceward.engine"), "__class__", OddLogger)
    task = world.consumer(results(OSError("a"), "r"), source=ListSource(transactions(1)))
    report = within(20, world.consume, task, consuming(process=retry(2)))
    assert (report.succeeded, report.retries) == (1, 1)


def catch_up() -> None:
    for _ in range(4):  # what is waiting may log as well
        caught_up = threading.Event()
        log_thread.post(caught_up.set)
        assert caught_up.wait(30)


@pytest.mark.req("CE-47")
def test_a_log_handler_that_never_returns_holds_up_no_call() -> None:
    """In threads. In asyncio it stops the event loop, whatever logs."""
    world = World("threads")
    handler = BlockingHandler()
    task = world.consumer(
        results(OSError("a")), exception=results(OSError("d")), source=ListSource(transactions(20))
    )
    with handling(handler, "onceward"):
        try:
            report = within(20, world.consume, task, consuming(process=retry(2), concurrency=4))
            assert (report.failed, report.retries) == (20, 20)
            assert handler.seen == []
        finally:
            handler.let_go.set()
            catch_up()
    assert len(handler.seen) >= 40


@pytest.mark.req("CE-47")
def test_a_log_handler_may_itself_run_an_engine() -> None:
    world = World("threads")
    inner = world.producer(results(OSError("inner")))
    nested: list[int] = []

    class Producing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if len(nested) < 2:
                nested.append(1)
                world.produce(inner, transactions(1))

    task = world.consumer(results(OSError("a")), source=ListSource(transactions(2)))
    with handling(Producing(), "onceward"):
        assert within(30, world.consume, task).failed == 2
        catch_up()
    assert nested == [1, 1]
