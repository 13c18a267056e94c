"""Spans: one per attempt, nested as the catalog shows, in one trace per transaction."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from onceward import Transaction
from onceward.connectors.memory import AsyncMemoryConnector, MemoryConnector
from onceward.task.exceptions import FetchException
from onceward.task.settings import EngineSettings
from onceward.telemetry.conventions import Destination
from onceward.testing import Recording, record
from tests.support.world import (
    SHORT,
    After,
    ListSource,
    SettlingSource,
    Until,
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


@pytest.fixture
def recording() -> Iterator[Recording]:
    with record() as made:
        yield made


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


@pytest.mark.req("CE-28")
def test_consumer_spans_nest_as_drawn(world: World, recording: Recording) -> None:
    process = results(None, business())
    task = world.consumer(process, source=ListSource(transactions(2)))
    world.consume(task)
    parents = {(span.name, recording.parent(span)) for span in recording.spans()}
    assert parents == {
        ("consume_transactions", None),
        ("fetch_transactions", "consume_transactions"),
        ("start_processing", "consume_transactions"),
        ("process", "start_processing"),
        ("handle_success", "start_processing"),
        ("handle_exception", "start_processing"),
    }


@pytest.mark.req("PE-15")
def test_producer_spans_nest_as_drawn(world: World, recording: Recording) -> None:
    task = world.producer(results(None, business()))
    world.produce(task, transactions(2))
    parents = {(span.name, recording.parent(span)) for span in recording.spans()}
    assert parents == {
        ("produce_transactions", None),
        ("start_producing", "produce_transactions"),
        ("produce", "start_producing"),
        ("produce.attempt", "produce"),
        ("handle_produce_success", "start_producing"),
        ("handle_produce_success.attempt", "handle_produce_success"),
        ("handle_produce_exception", "start_producing"),
        ("handle_produce_exception.attempt", "handle_produce_exception"),
    }


@pytest.mark.req("PE-15")
def test_each_produced_transaction_is_one_subtree_of_one_trace(world: World, recording: Recording) -> None:
    task = world.producer(results(system(), None))
    world.produce(task, transactions(3), producing(produce=retry(2), concurrency=3))
    roots = {
        span.context.span_id: attributes(span)["transaction_id"]
        for span in recording.spans("start_producing")
        if span.context is not None
    }
    assert sorted(map(str, roots.values())) == ["t0", "t1", "t2"]
    by_id = {span.context.span_id: span for span in recording.spans() if span.context is not None}
    for span in recording.spans():
        at: ReadableSpan | None = span
        owner = attributes(span).get("transaction_id")
        while at is not None and at.context is not None and at.context.span_id not in roots:
            at = by_id.get(at.parent.span_id) if at.parent is not None else None
        if owner is not None:
            assert at is not None
            assert at.context is not None
            assert roots[at.context.span_id] == owner
    assert len({trace_id(span) for span in recording.spans()}) == 1


@pytest.mark.req("CE-27", "CE-23")
def test_every_attempt_makes_a_span_that_says_what_it_was(world: World, recording: Recording) -> None:
    task = world.consumer(results(system("first"), system("second"), 7), source=ListSource(transactions(1)))
    policy = consuming(process=retry(4, timeout=30, backoff=0.001, backoff_multiplier=3, backoff_cap=0.002))
    world.consume(task, policy)
    spans = [attributes(span) for span in recording.spans("process")]
    assert [span["attempt"] for span in spans] == [0, 1, 2]
    assert [span.get("exception.message") for span in spans] == ["first", "second", None]
    for span in spans:
        assert span["task"] == "Orders"
        assert span["step"] == "process"
        assert span["transaction_id"] == "t0"
        assert span["max_attempts"] == 4
        assert span["timeout"] == 30
        assert (span["backoff"], span["backoff_multiplier"], span["backoff_cap"]) == (0.001, 3, 0.002)


@pytest.mark.req("CE-27", "CE-11")
def test_every_fetch_attempt_makes_a_span(world: World, recording: Recording) -> None:
    source = ListSource(script=[OSError("gone"), transactions(1), []])
    world.consume(world.consumer(source=source), consuming(fetch=retry(2)))
    spans = [attributes(span) for span in recording.spans("fetch_transactions")]
    assert [(span["attempt"], span.get("exception.message")) for span in spans] == [
        (0, "OSError: gone"),
        (1, None),
        (0, None),
    ]


@pytest.mark.req("CE-27")
def test_a_timed_out_attempt_says_so_in_its_span(world: World, recording: Recording) -> None:
    task = world.consumer(results(Until(lambda: False), None), source=ListSource(transactions(1)))
    world.consume(task, consuming(process=retry(2, timeout=SHORT)))
    first, second = (attributes(span) for span in recording.spans("process"))
    assert first["category"] == "TIMEOUT"
    assert first["exception.message"] == f"took longer than {SHORT} s"
    assert "exception.message" not in second


@pytest.mark.req("PE-16")
def test_producer_spans_carry_ids_attempts_and_policy_but_no_result(
    world: World, recording: Recording
) -> None:
    task = world.producer(results(system("once"), {"secret": 1}))
    world.produce(
        task, transactions(1), producing(produce=retry(3, timeout=9), batch=5, concurrency=2, limit=4)
    )
    step = attributes(recording.span("produce"))
    assert step["transaction_id"] == "t0"
    assert (step["attempts"], step["max_attempts"], step["timeout"]) == (2, 3, 9)
    failed, _ = (attributes(span) for span in recording.spans("produce.attempt"))
    assert failed["exception.message"] == "once"
    loop = attributes(recording.span("produce_transactions"))
    assert (loop["batch_size"], loop["concurrency"], loop["limit"]) == (5, 2, 4)
    assert not [span for span in recording.spans() if "secret" in str(attributes(span))]


@pytest.mark.req("PE-16", "CE-38")
def test_a_result_shows_only_the_fields_that_are_allowed(world: World, recording: Recording) -> None:
    settings = EngineSettings(telemetry_fields=("result.total", "payload.order", "payload.missing"))
    task = world.producer(lambda _: {"total": 3, "card": "4111"}, settings=settings)
    world.produce(task, [Transaction(id="t0", payload={"order": "o1", "card": "4111"})])
    assert attributes(recording.span("produce.attempt"))["result.total"] == 3
    assert attributes(recording.span("start_producing"))["payload.order"] == "o1"
    assert not [span for span in recording.spans() if "4111" in str(attributes(span))]


@pytest.mark.req("CE-38", "PE-19")
def test_no_span_shows_payload_result_or_metadata(world: World, recording: Recording) -> None:
    given = [Transaction(id="t0", payload="PAYLOAD", metadata={"note": "METADATA"})]
    world.consume(world.consumer(lambda _: "RESULT", source=ListSource(given)))
    world.produce(world.producer(lambda _: "RESULT"), given)
    shown = " ".join(f"{attributes(span)} {span.events}" for span in recording.spans())
    for secret in ("PAYLOAD", "METADATA", "RESULT"):
        assert secret not in shown


@pytest.mark.req("CE-25")
def test_all_attempts_of_a_transaction_share_one_context(world: World, recording: Recording) -> None:
    marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="unset")
    seen: list[tuple[str, str]] = []

    def process(transaction: Transaction) -> None:
        seen.append(
            (marker.get(), trace.format_trace_id(trace.get_current_span().get_span_context().trace_id))
        )
        marker.set("kept")
        if len(seen) < 3:
            raise system()

    task = world.consumer(process, source=ListSource(transactions(1)))
    world.consume(task, consuming(process=retry(3, timeout=30, backoff=0.001)))
    assert [value for value, _ in seen] == ["unset", "kept", "kept"]
    assert len({found for _, found in seen}) == 1
    assert {trace.format_trace_id(trace_id(span)) for span in recording.spans("process")} == {seen[0][1]}


@pytest.mark.req("CE-25")
def test_user_spans_are_children_of_the_attempt_they_run_in(world: World, recording: Recording) -> None:
    tracer = recording.tracer_provider.get_tracer("user")

    def process(_: Transaction) -> None:
        with tracer.start_as_current_span("charge card"):
            pass

    world.consume(
        world.consumer(process, source=ListSource(transactions(1))), consuming(process=retry(timeout=30))
    )
    assert recording.parent(recording.span("charge card")) == "process"


@pytest.mark.req("CE-30")
def test_transactions_see_no_span_of_one_another(world: World, recording: Recording) -> None:
    both_inside = threading.Barrier(2, timeout=10) if not world.asynchronous else None
    seen: dict[str, int] = {}

    def process(transaction: Transaction) -> After:
        if both_inside is not None:
            both_inside.wait()
        seen[transaction.id] = trace.get_current_span().get_span_context().span_id
        return After(0.01)

    world.consume(world.consumer(process, source=ListSource(transactions(2))), consuming(concurrency=2))
    own = {
        attributes(span)["transaction_id"]: span.context.span_id
        for span in recording.spans("process")
        if span.context is not None
    }
    assert seen == own


@pytest.mark.req("CE-25", "CE-28")
def test_a_consumer_continues_the_trace_a_transaction_carries(world: World, recording: Recording) -> None:
    given = [Transaction(id="t0", metadata={"traceparent": TRACEPARENT})]
    world.consume(world.consumer(source=ListSource(given)))
    life = recording.span("start_processing")
    assert trace.format_trace_id(trace_id(life)) == TRACEPARENT.split("-")[1]
    assert life.parent is not None
    assert trace.format_span_id(life.parent.span_id) == TRACEPARENT.split("-")[2]
    assert [link.context for link in life.links] == [recording.span("consume_transactions").context]
    assert trace_id(recording.span("process")) == trace_id(life)


@pytest.mark.req("CE-28")
def test_a_malformed_trace_context_does_not_hurt(world: World, recording: Recording) -> None:
    for nonsense in ("", "garbage", 7):
        given = [Transaction(id="t0", metadata={"traceparent": nonsense})]
        assert world.consume(world.consumer(source=ListSource(given))).succeeded == 1
    assert {recording.parent(span) for span in recording.spans("start_processing")} == {
        "consume_transactions"
    }


@pytest.mark.req("CE-25", "PE-15")
def test_producer_and_consumer_share_one_trace_through_a_connector(
    world: World, recording: Recording
) -> None:
    connector = AsyncMemoryConnector() if world.asynchronous else MemoryConnector()

    class Orders(world.hybrid_base):  # type: ignore[misc, name-defined]
        if world.asynchronous:

            async def produce_transaction(self, transaction: Transaction) -> None:
                await self.connectors["source"].dispatch_transactions_async([transaction])

            async def process_transaction(self, transaction: Transaction) -> None: ...
        else:

            def produce_transaction(self, transaction: Transaction) -> None:
                self.connectors["source"].dispatch_transactions([transaction])

            def process_transaction(self, transaction: Transaction) -> None: ...

    task = Orders({"source": connector})
    world.produce(task, transactions(1))
    world.consume(task)
    assert trace_id(recording.span("start_processing")) == trace_id(recording.span("start_producing"))
    assert recording.parent(recording.span("start_processing")) == "produce.attempt"


@pytest.mark.req("CE-36")
def test_a_failed_loop_marks_its_span(world: World, recording: Recording) -> None:
    task = world.consumer(source=ListSource(script=[OSError("gone")]))
    with pytest.raises(Exception, match="gone"):
        world.consume(task)
    span = recording.span("consume_transactions")
    assert span.status.is_ok is False
    assert attributes(span)["stop_reason"] == "fetch_error"


# ── which limit ended an attempt ────────────────────────────────────────────────────────────────────────

LIMITS = [
    ({"transaction_timeout": SHORT}, 30.0, "the lifecycle ran out of time"),
    ({"timeout": SHORT}, 30.0, "the loop ran out of time"),
    ({"transaction_timeout": 30.0}, SHORT, f"took longer than {SHORT} s"),
    ({"transaction_timeout": SHORT}, None, "the lifecycle ran out of time"),
]


@pytest.mark.req("CE-28")
@pytest.mark.parametrize(("loop", "step", "message"), LIMITS)
def test_the_span_of_an_attempt_names_the_limit_that_ended_it(
    world: World, recording: Recording, loop: dict[str, float], step: float | None, message: str
) -> None:
    task = world.consumer(results(Until(lambda: False)), source=ListSource(transactions(1)))
    with suppress(TimeoutError):
        world.consume(task, consuming(process=retry(timeout=step), **loop))
    assert attributes(recording.span("process"))["exception.message"] == message


@pytest.mark.req("PE-07")
def test_the_attempt_of_a_producers_success_handler_is_system_whatever_it_raises(
    world: World, recording: Recording
) -> None:
    task = world.producer(results("sent"), success=results(business()))
    world.produce(task, transactions(1))
    assert attributes(recording.span("handle_produce_success.attempt"))["category"] == "SYSTEM"
    assert attributes(recording.span("handle_produce_success"))["category"] == "SYSTEM"


@pytest.mark.req("CE-28", "CE-12")
@pytest.mark.parametrize("batch", [transactions(11), ["order"], 7], ids=["too many", "not one", "no list"])
def test_the_span_of_a_fetch_whose_batch_is_refused_shows_why(
    world: World, recording: Recording, batch: object
) -> None:
    with pytest.raises(FetchException) as raised:
        world.consume(world.consumer(source=ListSource(script=[batch])))
    span = recording.span("fetch_transactions")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["exception.message"] == str(raised.value)


@pytest.mark.req("UI-05")
def test_spans_follow_the_conventions_for_messaging(world: World, recording: Recording) -> None:
    task = world.consumer(results(None), source=ListSource(transactions(1)))
    task.destination = Destination("redis", "orders", "billing")
    world.consume(task)
    named = {span.name: span for span in recording.spans()}
    life, fetch = named["start_processing"], named["fetch_transactions"]
    assert (life.kind, fetch.kind) == (SpanKind.CONSUMER, SpanKind.CLIENT)
    assert attributes(life) == attributes(life) | {
        "messaging.system": "redis",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": attributes(life)["transaction_id"],
        "messaging.consumer.group.name": "billing",
    }
    assert attributes(fetch)["messaging.operation.type"] == "receive"
    assert "messaging.system" not in attributes(named["process"])


@pytest.mark.req("UI-05")
def test_spans_of_fetching_and_settling_say_how_many_messages_it_was(
    world: World, recording: Recording
) -> None:
    world.consume(world.consumer(results(1, 2, 3), source=SettlingSource(transactions(3))))
    counts = {
        name: [attributes(span)["messaging.batch.message_count"] for span in recording.spans(name)]
        for name in ("fetch_transactions", "settle_transactions")
    }
    assert counts["fetch_transactions"][0] == 3
    assert sum(counts["settle_transactions"]) == 3
