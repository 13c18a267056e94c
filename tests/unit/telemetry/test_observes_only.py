"""Telemetry observes: whatever it does, and however long that takes, the outcomes are the same as without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler

from onceward import Transaction
from onceward.connectors.codec import current_trace_context
from onceward.task.settings import EngineSettings
from onceward.telemetry import metrics
from onceward.telemetry.setup import Telemetry
from onceward.testing import FakeClock, record
from tests.support.world import (
    SHORT,
    After,
    ListSource,
    SettlingSource,
    World,
    business,
    consuming,
    producing,
    results,
    retry,
    system,
    transactions,
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Broken(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def refuse(*_: Any, **__: Any) -> Any:
    raise Broken


# ── ways to break ───────────────────────────────────────────────────────────────────────────────────────


class Processor(SpanProcessor):
    """Calls these when spans with this name, or all, start and end."""

    def __init__(
        self,
        *,
        start: Callable[..., Any] | None = None,
        end: Callable[..., Any] | None = None,
        name: str = "",
    ) -> None:
        self._start, self._end, self._name = start, end, name

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self._start is not None and self._name in ("", span.name):
            self._start()

    def on_end(self, span: ReadableSpan) -> None:
        if self._end is not None and self._name in ("", span.name):
            self._end()


class RefusingSampler(Sampler):
    should_sample = refuse  # type: ignore[assignment]
    get_description = refuse  # type: ignore[assignment]


class RefusingSpan(trace.NonRecordingSpan):
    set_attribute = set_attributes = add_event = set_status = end = refuse  # type: ignore[assignment]

    def is_recording(self) -> bool:
        return True


class StrangeSpan(RefusingSpan):
    get_span_context = refuse  # type: ignore[assignment]


class Tracer(trace.Tracer):
    start_as_current_span: Any = None

    def __init__(self, span: type[trace.NonRecordingSpan]) -> None:
        self._span = span

    def start_span(self, *_: Any, **__: Any) -> trace.Span:
        return self._span(trace.INVALID_SPAN_CONTEXT)


class Tracers(trace.TracerProvider):
    def __init__(self, span: type[trace.NonRecordingSpan]) -> None:
        self._span = span

    def get_tracer(self, *_: Any, **__: Any) -> Tracer:
        return Tracer(self._span)


class RefusingTracers(trace.TracerProvider):
    get_tracer = refuse  # type: ignore[assignment]


class Instrument:
    add = record = refuse


class Meter:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Instrument()


class RefusingMeter:
    __getattr__ = refuse


class Meters:
    def __init__(self, meter: Any) -> None:
        self.get_meter = (lambda *_, **__: meter) if meter is not None else refuse


def processed_by(**calls: Any) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Processor(**calls))
    return provider


class Unhashable(Meters):
    __hash__ = None  # type: ignore[assignment]


BREAKS: dict[str, tuple[Any, Any]] = {
    "unhashable": (None, Unhashable(Meter())),
    "on_start": (processed_by(start=refuse), None),
    "on_end": (processed_by(end=refuse), None),
    "both": (processed_by(start=refuse, end=refuse), None),
    "sampler": (TracerProvider(sampler=RefusingSampler(), shutdown_on_exit=False), None),
    "spans": (Tracers(RefusingSpan), None),
    "span contexts": (Tracers(StrangeSpan), None),
    "tracers": (RefusingTracers(), None),
    "instruments": (None, Meters(Meter())),
    "meter": (None, Meters(RefusingMeter())),
    "meters": (None, Meters(None)),
    "all": (Tracers(StrangeSpan), Meters(Meter())),
}


@pytest.fixture(params=BREAKS)
def broken(request: pytest.FixtureRequest) -> Iterator[None]:
    with metrics.override(*BREAKS[request.param]):
        yield


SCRIPT = (1, business(), system(), 2, Broken(), Broken(), 3)


@pytest.mark.req("CE-49")
def test_a_consumer_has_the_same_outcomes(world: World, broken: None) -> None:
    source = SettlingSource(
        [*transactions(4), Transaction(id="t4", payload=4, metadata={"traceparent": TRACEPARENT})]
    )
    task = world.consumer(results(*SCRIPT), success=lambda *_: None, exception=lambda *_: None, source=source)
    report = world.consume(task, consuming(process=retry(2, timeout=30)))
    assert (report.succeeded, report.failed, report.retries) == (3, 2, 2)
    assert source.verdicts() == {"t0": "done", "t1": "failed", "t2": "done", "t3": "failed", "t4": "done"}


@pytest.mark.req("CE-49")
def test_a_producer_has_the_same_outcomes(world: World, broken: None) -> None:
    report = world.produce(
        world.producer(results(*SCRIPT)), transactions(5), producing(produce=retry(2), transaction_timeout=30)
    )
    assert (report.succeeded, report.failed, report.retries) == (3, 2, 2)


def test_a_processor_that_raises_does_not_take_the_spans_of_others(world: World) -> None:
    with record() as recording:
        recording.tracer_provider.add_span_processor(Processor(end=refuse))
        world.consume(world.consumer(results(*SCRIPT), source=ListSource(transactions(3))))
    assert len(recording.spans("process")) == len(recording.spans("start_processing")) == 3


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-49")
@pytest.mark.parametrize("when", ["start", "end"])
def test_the_time_of_a_span_processor_does_not_count_towards_an_attempts_limit(
    world: World, when: str
) -> None:
    slow: dict[str, Any] = {when: lambda: time.sleep(1.5 * SHORT), "name": "process"}
    with metrics.override(processed_by(**slow)):
        task = world.consumer(source=ListSource(transactions(1)))
        assert world.consume(task, consuming(process=retry(timeout=SHORT))).succeeded == 1


@pytest.mark.parametrize("when", ["start", "end"])
@pytest.mark.parametrize(
    "name",
    [
        "start_producing",
        "produce",
        "produce.attempt",
        "handle_produce_success",
        "handle_produce_success.attempt",
    ],
)
def test_the_time_of_a_span_processor_does_not_count_towards_a_transactions_limit(
    world: World, when: str, name: str
) -> None:
    clock = FakeClock()
    slow: dict[str, Any] = {when: lambda: clock.advance(100), "name": name}
    with metrics.override(processed_by(**slow)):
        task = world.producer(results(system(), 1), success=lambda *_: None, clock=clock)
        policy = producing(produce=retry(2), transaction_timeout=10)
        assert world.produce(task, transactions(1), policy).succeeded == 1


def test_a_span_processor_that_holds_up_the_event_loop_costs_no_other_attempt_its_time() -> None:
    world = World("asyncio")
    slow = processed_by(end=lambda: time.sleep(2 * SHORT), name="process")
    with metrics.override(slow):
        task = world.consumer(
            lambda transaction: After(SHORT / 2 if transaction.id == "t0" else SHORT / 10),
            source=ListSource(transactions(2)),
        )
        report = world.consume(task, consuming(process=retry(timeout=SHORT), concurrency=2))
    assert report.succeeded == 2


@pytest.mark.req("CE-49")
@pytest.mark.parametrize("when", ["start", "end"])
def test_a_span_processor_that_holds_up_the_event_loop_costs_no_other_transaction_its_time(when: str) -> None:
    world = World("asyncio")
    clock = FakeClock()
    slow: dict[str, Any] = {when: lambda: clock.advance(100), "name": "process"}
    with metrics.override(processed_by(**slow)):
        task = world.consumer(
            lambda _: After(0.001),
            success=lambda *_: After(0.001),
            source=ListSource(transactions(4)),
            clock=clock,
        )
        report = world.consume(task, consuming(transaction_timeout=10, batch=4, concurrency=4))
    assert report.succeeded == 4


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────


class Payload:
    @property
    def order_id(self) -> str:
        raise Broken

    @property
    def total(self) -> Any:
        return self

    number = 10**30
    name = "a\ud800b"
    kind = 3

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Refusing(Mapping[str, Any]):
    __getitem__ = get = refuse  # type: ignore[assignment]
    __iter__ = __len__ = refuse


FIELDS = (
    "payload.order_id",
    "payload.total",
    "payload.number",
    "payload.name",
    "payload.kind",
    "result.total",
)


@pytest.mark.parametrize("payload", [Payload(), Refusing()], ids=["object", "mapping"])
def test_a_field_that_cannot_be_read_is_left_out(world: World, payload: Any) -> None:
    with record() as recording:
        task = world.consumer(
            lambda _: payload,
            source=ListSource([Transaction(payload=payload)]),
            settings=EngineSettings(telemetry_fields=FIELDS),
        )
        assert world.consume(task).succeeded == 1
    shown = dict(recording.span("start_processing").attributes or {})
    assert {name for name in shown if name.startswith("payload.")} == (
        {"payload.total", "payload.number", "payload.name", "payload.kind"}
        if isinstance(payload, Payload)
        else set()
    )
    if isinstance(payload, Payload):
        assert shown["payload.total"] == "Payload, which cannot be shown"
        assert shown["payload.number"] == str(10**30), "more than an exporter can encode as a number"
        assert shown["payload.name"] == "a?b", "an exporter could not encode it"


@pytest.mark.parametrize("handler", ["process", "success", "exception"])
def test_an_exception_that_cannot_be_shown_has_its_span(world: World, handler: str) -> None:
    behaviors = {"process": results(business() if handler == "exception" else 1), handler: results(Broken())}
    with record() as recording:
        task = world.consumer(source=ListSource(transactions(1)), **behaviors)
        assert world.consume(task).failed == 1
    span = recording.span("process" if handler == "process" else f"handle_{handler}")
    assert (span.attributes or {})["category"] == "SYSTEM"
    assert "Broken" in str((span.attributes or {})["exception.message"])
    assert (recording.span("start_processing").attributes or {})["outcome"] == "failed"


def test_a_loop_error_that_cannot_be_shown_has_its_span(world: World) -> None:
    with record() as recording, pytest.raises(Exception, match="fetching gave up"):
        world.consume(world.consumer(source=ListSource(script=[Broken()])))
    assert not recording.span("fetch_transactions").status.is_ok


# ── the edges ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_message_is_sent_without_a_trace_if_its_span_cannot_be_read() -> None:
    class Span(trace.NonRecordingSpan):
        get_span_context = refuse  # type: ignore[assignment]

    with trace.use_span(Span(trace.INVALID_SPAN_CONTEXT)):
        assert current_trace_context() == {}


def test_an_exporter_that_cannot_be_shut_down_does_not_fail_the_run() -> None:
    ended: list[int] = []
    Telemetry([lambda: ended.append(1), refuse]).shutdown()
    assert ended == [1]


def test_the_first_failure_is_logged_and_the_next_are_not(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.telemetry.safety._reported", set())
    with metrics.override(processed_by(end=refuse)):
        world.consume(world.consumer(source=ListSource(transactions(20))))
    lines = [each for each in caplog.records if "telemetry failed" in each.getMessage()]
    assert len(lines) == 1
    assert "Broken" in lines[0].getMessage()
