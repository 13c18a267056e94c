"""Log lines under an engine name their transaction, and never contain a payload."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from onceward import Transaction
from onceward.telemetry import logs
from onceward.testing import record
from tests.support.world import ListSource, World, business, consuming, results, retry, system, transactions

user_log = logging.getLogger("shop.orders")


@pytest.fixture(autouse=True)
def _log_fields(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    added = logs.LogFields()
    caplog.handler.addFilter(added)
    yield
    caplog.handler.removeFilter(added)


def fields(record: logging.LogRecord) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in ("task", "step", "attempt", "transaction_id"))


@pytest.mark.req("CE-30")
def test_user_log_lines_carry_task_step_attempt_and_transaction(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def process(transaction: Transaction) -> None:
        user_log.warning("processing")
        results(system() if transaction.id == "t0" and len(caplog.records) < 2 else None)()

    task = world.consumer(
        process, success=lambda *_: user_log.warning("done"), source=ListSource(transactions(2))
    )
    world.consume(task, consuming(process=retry(2)))
    assert [fields(each) for each in caplog.records if each.name == "shop.orders"] == [
        ("Orders", "process", 0, "t0"),
        ("Orders", "process", 1, "t0"),
        ("Orders", "success", 0, "t0"),
        ("Orders", "process", 0, "t1"),
        ("Orders", "success", 0, "t1"),
    ]


@pytest.mark.req("CE-36")
def test_every_failure_has_a_log_line_with_transaction_and_step(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    process = results(business("card expired"), system("link down"))
    exception = results(OSError("no handler"))
    world.consume(world.consumer(process, exception=exception, source=ListSource(transactions(2))))
    lines = [(each.levelname, *fields(each)[1:], each.getMessage()) for each in caplog.records]
    assert ("WARNING", "process", 0, "t0", "process refused: BUSINESS [t0]: card expired") in lines
    assert any(line[:4] == ("ERROR", "process", 0, "t1") and "link down" in line[4] for line in lines)
    assert sum(line[1] == "exception" and "no handler" in line[4] for line in lines) == 2


def test_log_lines_carry_trace_and_span_when_there_is_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with record() as recording:
        task = world.consumer(lambda _: user_log.warning("here"), source=ListSource(transactions(1)))
        world.consume(task)
        context = recording.span("process").context
    assert context is not None
    (line,) = [each for each in caplog.records if each.name == "shop.orders"]
    assert line.trace_id == f"{context.trace_id:032x}"  # type: ignore[attr-defined]
    assert line.span_id == f"{context.span_id:016x}"  # type: ignore[attr-defined]


def test_lines_outside_an_engine_have_the_fields_empty(caplog: pytest.LogCaptureFixture) -> None:
    user_log.warning("outside")
    assert {name: getattr(caplog.records[0], name) for name in logs.FIELDS} == dict.fromkeys(logs.FIELDS, "")


@pytest.mark.req("CE-38", "PE-19")
def test_no_log_line_shows_a_payload(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    given = [Transaction(id=f"t{n}", payload="PAYLOAD", metadata={"note": "METADATA"}) for n in range(3)]
    process = results(business(), system(), "RESULT")
    world.consume(world.consumer(process, source=ListSource(given)), consuming(process=retry(2)))
    world.produce(world.producer(results(business(), system())), given)
    text = caplog.text
    for secret in ("PAYLOAD", "METADATA", "RESULT"):
        assert secret not in text


def test_without_an_sdk_no_span_attribute_or_record_is_built() -> None:
    """In another process, because this one has an SDK."""
    script = """
        import logging
        import opentelemetry.trace as trace
        from onceward import ConsumerTask, Transaction
        from onceward.telemetry import engine_spans

        def refuse(*_, **__):
            raise AssertionError("built telemetry although no SDK is set up")

        trace.NonRecordingSpan.__init__ = refuse
        trace.NoOpTracer.start_span = refuse
        trace.ProxyTracer.start_span = refuse
        engine_spans.EngineSpans.__init__ = refuse
        logging.setLogRecordFactory(refuse)

        class Source:
            batches = [[Transaction(id=str(n)) for n in range(3)], []]
            def fetch_transactions(self, size):
                return self.batches.pop(0)

        class Task(ConsumerTask):
            def process_transaction(self, transaction):
                return None

        assert Task({"source": Source()}).consume_transactions().succeeded == 3
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


LAST_LINE = """
import logging, sys
from onceward.telemetry.logger import OwnLogger

logging.basicConfig(stream=sys.stdout, format="%(message)s")
log = OwnLogger(logging.getLogger("onceward.engine"))

class Kept:
    def __del__(self, log=log):
        log.error("the last line")

if sys.argv[1] == "later":
    log.error("the first line")
kept = Kept()
"""


@pytest.mark.req("CE-47")
@pytest.mark.parametrize("begun", ["now", "later"])
def test_a_line_that_is_logged_while_the_interpreter_ends_comes_out(begun: str) -> None:
    """The thread that emits the lines cannot be started any more, or does not run any more."""
    done = subprocess.run(
        [sys.executable, "-c", LAST_LINE, begun], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.splitlines()[-1:] == ["the last line"], done.stderr
    assert (done.returncode, done.stderr) == (0, "")
