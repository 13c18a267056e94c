"""The span file: what is kept of spans; many processes may write it, and it does not grow forever."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from onceward import Transaction
from onceward.task.settings import EngineSettings
from onceward.telemetry import metrics
from onceward.telemetry.span_exporter import SpanFileExporter
from onceward.telemetry.span_file import Retry, older, read
from tests.support.world import ListSource, World, business, consuming, results, retry, system, transactions

SECRET = "4111-1111-1111-1111"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "spans.jsonl"


@contextmanager
def written_to(path: Path, limit: int = 10_000_000) -> Iterator[trace.Tracer]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SpanFileExporter(path, limit)))
    with metrics.override(provider):
        yield provider.get_tracer("test")
    provider.shutdown()


def test_the_spans_of_a_call_are_in_the_file_with_what_matters(world: World, path: Path) -> None:
    task = world.consumer(results(system("no answer"), None), source=ListSource(transactions(1)))
    with written_to(path):
        world.consume(task, consuming(process=retry(3, backoff=0.02)))
    spans = {(span.name, span.attributes.get("attempt")): span for span in read(path).spans}
    life, first, second = (
        spans[each] for each in (("start_processing", None), ("process", 0), ("process", 1))
    )
    assert {first.trace, second.trace} == {life.trace}
    assert {first.parent, second.parent} == {life.id}
    assert (first.failed, second.failed, life.failed) == (True, False, False)
    assert first.attributes["exception.message"] == "no answer"
    assert first.attributes["category"] == "SYSTEM"
    assert life.attributes["outcome"] == "succeeded"
    assert life.retries == [Retry("process", 0, 0.02)]
    assert life.began <= first.began <= first.ended <= second.began <= second.ended <= life.ended


def test_a_payload_is_in_the_file_only_where_its_field_was_named(world: World, path: Path) -> None:
    def process(transaction: Transaction) -> str:
        trace.get_current_span().set_attribute("order", str(transaction.payload))
        with tracer.start_as_current_span("bank") as span:
            span.set_attribute("db.parameters", str(transaction.payload))
            span.add_event("sent", {"body": str(transaction.payload)})
            span.set_status(trace.StatusCode.ERROR, str(transaction.payload))
        return SECRET

    source = ListSource([Transaction(payload={"card": SECRET, "country": "at"}, metadata={"by": SECRET})])
    settings = EngineSettings(telemetry_fields=("payload.country",))
    task = world.consumer(process, source=source, settings=settings)
    with written_to(path) as tracer:
        world.consume(task)
    assert SECRET not in path.read_text()
    assert {span.attributes.get("payload.country") for span in read(path).spans} == {None, "at"}
    (bank,) = (span for span in read(path).spans if span.name == "bank")
    assert (bank.attributes, bank.failed) == ({}, True)


def test_a_full_file_steps_back_and_the_one_before_it_goes(path: Path) -> None:
    with written_to(path, limit=5_000) as tracer:
        for number in range(200):
            tracer.start_span(f"number-{number}").end()
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, older(path).name]
    assert max(each.stat().st_size for each in path.parent.iterdir()) <= 5_000
    numbers = [int(span.name.removeprefix("number-")) for span in read(path).spans]
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 20


def test_a_batch_larger_than_the_limit_is_written_all_the_same(path: Path) -> None:
    with written_to(path, limit=10) as tracer:
        tracer.start_span("a").end()
        tracer.start_span("b").end()
    assert [span.name for span in read(path).spans] == ["a", "b"]


WRITER = """
    import sys
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from onceward.telemetry.span_exporter import SpanFileExporter

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(SpanFileExporter(sys.argv[1], int(sys.argv[2])), 500, 1, 7))
    tracer = provider.get_tracer("test")
    for number in range(300):
        tracer.start_span(f"{sys.argv[3]}-{number}").end()
        if number % 50 == 0:
            provider.force_flush()
    provider.shutdown()
"""


@pytest.mark.parametrize("limit", [10_000_000, 4_000])
def test_no_line_is_torn_when_several_processes_write(path: Path, limit: int) -> None:
    code = textwrap.dedent(WRITER)
    writers = [
        subprocess.Popen([sys.executable, "-c", code, path, str(limit), name]) for name in ("a", "b", "c")
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = read(path)
    assert found.unreadable == 0
    if limit > 1_000_000:
        assert len(found.spans) == 900
        assert len({span.process for span in found.spans}) == 3
    else:
        assert max(each.stat().st_size for each in path.parent.iterdir()) <= limit


def test_what_is_no_span_is_counted_and_left_out(path: Path) -> None:
    with written_to(path) as tracer:
        tracer.start_span("whole").end()
    path.write_bytes(path.read_bytes() + b'\n{"trace": "torn\n\xff\n[]\n')
    found = read(path)
    assert ([span.name for span in found.spans], found.unreadable) == (["whole"], 3)


def test_a_file_that_cannot_be_written_is_reported_and_stops_nothing(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    task = world.consumer(results(business()), source=ListSource(transactions(1)))
    with written_to(tmp_path / "file" / "spans.jsonl"), caplog.at_level(logging.WARNING):
        assert world.consume(task).failed == 1
    assert "could not write" in caplog.text
    assert f"spans to {tmp_path}/file/spans.jsonl" in caplog.text
    assert SpanFileExporter(tmp_path / "file" / "x").export([]) is SpanExportResult.FAILURE


SETUP = """
    from opentelemetry import metrics, trace
    from onceward import telemetry
    from onceward.telemetry import metrics as providers

    handle = telemetry.setup()
    trace.get_tracer("test").start_span("hello").end()
    handle.shutdown()
    print(providers.meter_provider())
"""


@pytest.mark.parametrize("exporter", [{}, {"OTEL_TRACES_EXPORTER": "console"}])
def test_the_variable_has_setup_write_a_file_and_open_nothing_else(
    path: Path, exporter: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SETUP)],
        env={"ONCEWARD_TRACE_FILE": str(path), **exporter},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [span.name for span in read(path).spans] == ["hello"]
    assert done.stderr == ""
    assert done.stdout.endswith("None\n")
    assert ('"name": "hello"' in done.stdout) == bool(exporter)
