"""Turn the engine's hooks into spans and metrics. Used only if an OpenTelemetry SDK is set up.

The engine calls `life_begins`, `step_begins`, … in the transaction's own context. Contexts are restored by value, not
detached by token: a context is discarded with its transaction, and a life that moves to another thread could not
use the tokens of the first thread's context.

Telemetry observes. Span processors, samplers and exporters are code of others: nothing here raises, and the engine
calls it outside of an attempt's time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, cast

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from onceward.middleware import Middleware
from onceward.telemetry import metrics
from onceward.telemetry.catalogue import RETRY_EVENT, SCOPE
from onceward.telemetry.conventions import COUNT, OPERATIONS, Destination, Messaging
from onceward.telemetry.metrics import EngineInstruments, instruments
from onceward.telemetry.redaction import redact
from onceward.telemetry.safety import quietly, report_failure, show
from onceward.telemetry.span_fields import SpanFields

NOTICEABLE = 0.001
"""Seconds that telemetry may take before it is set off against time limits."""

COUNT_INTERVAL = 0.2
"""Seconds after which successes are counted, if others follow."""

PRODUCING = "start_producing"
"""The span of a producer's transaction."""

F = TypeVar("F", bound=Callable[..., Any])

_propagator = TraceContextTextMapPropagator()


class Names(NamedTuple):
    """The span names of a call and its transactions, and the settings and fields the spans show."""

    task: str
    loop: str
    life: str
    settings: dict[str, Any]
    fields: tuple[str, ...]
    destination: Destination | None = None


class OpenSpan(NamedTuple):
    """The span of an attempt, the context around it, and when the attempt began."""

    span: Span
    outside: otel.Context
    since: float


class LifeSpans:
    """The open spans of one transaction, and the contexts inside them."""

    __slots__ = ("attempt", "inside_life", "inside_step", "life", "step")

    def __init__(self, life: Span, inside: otel.Context) -> None:
        self.life = life
        self.inside_life = inside
        self.step: Span | None = None
        self.inside_step = inside
        self.attempt: OpenSpan | None = None


def observing(method: F) -> F:
    """Let a method raise nothing. What takes long does not count towards a time limit: see `Call.forgive`."""

    @wraps(method)
    def observe(self: EngineSpans, *arguments: Any, **named: Any) -> Any:
        began = self._now()
        result = None
        try:
            result = method(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001
            report_failure(method.__qualname__, error)
        spent = self._now() - began
        if spent > NOTICEABLE:
            self._forgive(spent, *arguments[:1])
        return result

    return cast(F, observe)


class EngineSpans(Middleware):
    """Records spans and metrics of each attempt, if an OpenTelemetry SDK is set up."""

    name = "telemetry"

    @classmethod
    def create_if_enabled(
        cls, names: Names, now: Callable[[], float], forgive: Callable[..., None]
    ) -> EngineSpans | None:
        """Return None if no OpenTelemetry SDK is set up, or if it does not work."""
        tracers, meters = metrics.tracer_provider(), metrics.meter_provider()
        if tracers is None and meters is None:
            return None
        found = None if meters is None else quietly(instruments, meters)
        made: EngineSpans | None = quietly(
            cls, names, tracers or trace.NoOpTracerProvider(), found, now, forgive
        )
        return made

    def __init__(
        self,
        names: Names,
        tracers: trace.TracerProvider,
        metrics: EngineInstruments | None,
        now: Callable[[], float],
        forgive: Callable[..., None],
    ) -> None:
        self._names = names
        self._tracer = tracers.get_tracer(SCOPE)
        self._metrics = metrics
        self._now = now
        self._forgive = forgive
        """Called with the seconds that something took, and the work it was about."""
        self._fields = SpanFields(names.fields)
        self._task = {"task": names.task}
        self._attributes: dict[int, dict[str, Any]] = {}
        self._produces = names.life == PRODUCING
        self._messaging = Messaging(names.destination, metrics)
        self._of_life = {**self._task, **self._messaging.of_span("send" if self._produces else "process")}
        self._abandoned: list[None] = []
        self._successes: list[None] = []
        """Not counted yet. Lists, because workers append to them at the same time."""
        self._counting = Lock()
        self._count_at = 0.0
        self._over = False
        self._loop_span: Span = trace.INVALID_SPAN
        self._inside_loop = otel.Context()

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────

    @observing
    def loop_begins(self, in_use: Callable[[], int]) -> None:
        attributes = {**self._task, **self._names.settings}
        self._loop_span = self._start(self._names.loop, otel.get_current(), attributes)
        self._inside_loop = trace.set_span_in_context(self._loop_span)
        otel.attach(self._inside_loop)
        if self._metrics is not None:
            self._metrics.slots_in_use[id(self)] = (self._names.task, in_use)

    @observing
    def loop_ends(self, report: Any, error: BaseException | None) -> None:
        self._over = True
        self.count_successes()
        if self._metrics is not None:
            self._metrics.slots_in_use.pop(id(self), None)
            # Those that never came to an end.
            if (left := report.abandoned - len(self._abandoned)) > 0:
                self._metrics.abandoned.add(left, self._task)
        attributes = {
            "processed": report.processed,
            "succeeded": report.succeeded,
            "failed": report.failed,
            "duplicates": report.duplicates,
            "postponed": report.postponed,
            "stop_reason": str(report.stop_reason),
        }
        self._end(self._loop_span, attributes, None if error is None else (_message(error), None))

    @observing
    def ask_begins(self, loop: Any, step: Any, arguments: tuple[Any, ...]) -> OpenSpan:
        attributes = {**self._static(step), "attempt": loop.attempt, "batch_size": loop.policy.batch.size}
        if step.name == "settle":
            attributes[COUNT] = len(arguments[0])
        return self._open(step.span, self._inside_loop, attributes, SpanKind.CLIENT)

    @observing
    def ask_ends(
        self, begun: OpenSpan | None, step: Any, error: Any, delay: float | None, reply: Any = None
    ) -> None:
        attributes = {}
        if error is None and step.name == "fetch":
            attributes[COUNT] = number = len(reply or ())
            self._messaging.consumed(number)
        self._close(begun, step, None if error is None else (error.message, error.category), attributes)
        if self._metrics is not None and delay is not None:
            self._metrics.retries.add(1, {**self._task, "step": step.name})

    @observing
    def record_fetch(self, *, empty: bool) -> None:
        if self._metrics is not None:
            self._metrics.fetches.add(1, self._task)
            if empty:
                self._metrics.empty_fetches.add(1, self._task)

    @observing
    def record_backoff(self, step: str, seconds: float) -> None:
        if self._metrics is not None and seconds:
            self._metrics.backoff.add(seconds, {**self._task, "step": step})

    # ── a transaction ───────────────────────────────────────────────────────────────────────────────────

    @observing
    def life_begins(self, life: Any) -> None:
        transaction = life.transaction
        parent, links = self._inside_loop, None
        if transaction.metadata and (remote := quietly(_remote_context, transaction)) is not None:
            # Continue the producer's trace; the batch it arrived in is only linked.
            parent, links = remote, [Link(self._loop_span.get_span_context())]
        attributes = {
            **self._of_life,
            "transaction_id": transaction.id,
            "messaging.message.id": transaction.id,
        }
        if self._fields:
            attributes.update(self._fields.of_transaction(transaction))
        kind = SpanKind.PRODUCER if self._produces else SpanKind.CONSUMER
        span = self._start(self._names.life, parent, attributes, links, kind)
        inside = trace.set_span_in_context(span, parent)
        life.spans = LifeSpans(span, inside)
        otel.attach(inside)

    @observing
    def life_ends(self, life: Any, outcome: Any) -> None:
        status = "abandoned" if outcome is None else str(outcome.status)
        if self._metrics is not None and not self._over:
            self._count(status, None if outcome is None else outcome.error)
        spans: LifeSpans | None = life.spans
        if spans is None:
            return
        if spans.attempt is not None:
            self._end(spans.attempt.span, {}, ("cut off", None))
        if spans.step is not None:
            self._end(spans.step, {})
        attributes: dict[str, Any] = {"outcome": status}
        failure = None
        if outcome is not None:
            if outcome.duplicate:
                attributes["duplicate"] = True
            if outcome.error is not None:
                failure = (outcome.error.message, outcome.error.category)
        self._end(spans.life, attributes, failure)

    def _count(self, status: str, error: Any) -> None:
        """Count an outcome at once, so a loop that streams shows current numbers; successes a few at a time."""
        metrics = self._metrics
        assert metrics is not None
        if status == "succeeded":
            self._successes.append(None)
            if self._now() >= self._count_at:
                self.count_successes()
        elif status == "failed":
            metrics.processed.add(1, self._task)
            metrics.failed.add(1, {**self._task, "category": str(error.category)})
            if self._produces:
                self._messaging.sent(1, error.category)
            self.count_successes()
        elif status == "abandoned":
            self._abandoned.append(None)
            metrics.abandoned.add(1, self._task)
            self.count_successes()

    @observing
    def count_successes(self) -> None:
        """Count the successes since the last time: when others are counted, when the loop wakes, and at intervals."""
        if self._metrics is None:
            return
        self._count_at = self._now() + COUNT_INTERVAL
        with self._counting:
            number = len(self._successes)
            del self._successes[:number]
        if number:
            self._metrics.processed.add(number, self._task)
            self._metrics.succeeded.add(number, self._task)
            if self._produces:
                self._messaging.sent(number)

    @observing
    def step_begins(self, life: Any, step: Any) -> None:
        spans: LifeSpans = life.spans
        if step.has_attempt_spans:
            attributes = {**self._static(step), "transaction_id": life.transaction_id}
            spans.step = self._start(step.span, spans.inside_life, attributes)
            spans.inside_step = trace.set_span_in_context(spans.step, spans.inside_life)
        otel.attach(spans.inside_step)

    @observing
    def step_ends(self, life: Any, step: Any, error: Any) -> None:
        spans: LifeSpans = life.spans
        if spans.step is not None:
            failure = None if error is None else (error.message, error.category)
            step_span, spans.step, spans.inside_step = spans.step, None, spans.inside_life
            otel.attach(spans.inside_life)
            self._end(step_span, {"attempts": life.attempt + 1}, failure)
            return
        otel.attach(spans.inside_life)

    @observing
    def record_retry(self, life: Any, step: Any, delay: float) -> None:
        """Record that another attempt follows after `delay` seconds."""
        if self._metrics is not None:
            self._metrics.retries.add(1, {**self._task, "step": step.name})
            self.record_backoff(step.name, delay)
        if life.spans.life.is_recording():
            life.spans.life.add_event(
                RETRY_EVENT, {"step": step.name, "attempt": life.attempt, "delay": delay}
            )

    @observing
    def record_timeout(self, step: str, limit: str) -> None:
        if self._metrics is not None:
            self._metrics.timeouts.add(1, {**self._task, "step": step, "limit": str(limit)})

    @observing
    def change_stuck(self, change: int) -> None:
        if self._metrics is not None:
            self._metrics.stuck.add(change, self._task)

    # ── an attempt ──────────────────────────────────────────────────────────────────────────────────────

    @observing
    def attempt_begins(self, life: Any, step: Any) -> None:
        spans: LifeSpans = life.spans
        attributes = {**self._static(step), "transaction_id": life.transaction_id, "attempt": life.attempt}
        name = f"{step.span}.attempt" if step.has_attempt_spans else step.span
        spans.attempt = self._open(name, spans.inside_step, attributes)

    @observing
    def attempt_ends(self, life: Any, step: Any, failed: Any, result: Any) -> None:
        """`failed` is the engine's `Failed`, or None if the attempt returned `result`."""
        spans: LifeSpans = life.spans
        attempt, spans.attempt = spans.attempt, None
        attributes: dict[str, Any] = {}
        failure: tuple[Any, Any] | None = None
        if failed is None:
            if self._fields and step.name in ("process", "produce"):
                attributes = self._fields.of_result(result)
        elif failed.limit is not None:
            failure = _describe_limit(step, failed.limit)
        elif (category := step.category_of(failed.error)) is None:
            attributes["outcome"] = "postponed"
        else:
            failure = (_message(failed.error), category)
        self._close(attempt, step, failure, attributes)

    # ── spans ───────────────────────────────────────────────────────────────────────────────────────────

    def _start(
        self,
        name: str,
        parent: otel.Context,
        attributes: dict[str, Any],
        links: Any = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Start a span; if that fails, its children become children of its parent."""
        try:
            return self._tracer.start_span(name, parent, kind, attributes, links)
        except Exception as error:  # noqa: BLE001
            report_failure("start_span", error)
            return trace.NonRecordingSpan(trace.get_current_span(parent).get_span_context())

    def _end(self, span: Span, attributes: dict[str, Any], failure: tuple[Any, Any] | None = None) -> None:
        """End a span, whatever becomes of its attributes. `failure` is a message and a category."""
        try:
            for name, value in attributes.items():
                span.set_attribute(name, value)
            if failure is not None:
                _mark_failed(span, *failure)
        except Exception as error:  # noqa: BLE001
            report_failure("set_attribute", error)
        try:
            span.end()
        except Exception as error:  # noqa: BLE001
            report_failure("span.end", error)

    def _open(
        self, name: str, outside: otel.Context, attributes: dict[str, Any], kind: SpanKind = SpanKind.INTERNAL
    ) -> OpenSpan:
        """Start the span of an attempt, and make it the current one."""
        span = self._start(name, outside, attributes, kind=kind)
        otel.attach(trace.set_span_in_context(span, outside))
        return OpenSpan(span, outside, perf_counter())

    def _close(
        self,
        attempt: OpenSpan | None,
        step: Any,
        failure: tuple[Any, Any] | None,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        if attempt is None:
            return
        took = perf_counter() - attempt.since
        otel.attach(attempt.outside)
        if self._metrics is not None:
            self._metrics.duration.record(took, {**self._task, "step": step.name})
            self._messaging.took(step.name, took, failure)
        self._end(attempt.span, attributes or {}, failure)

    def _static(self, step: Any) -> dict[str, Any]:
        """The attributes that every span of a step shows, cached."""
        attributes = self._attributes.get(id(step))
        if attributes is None:
            attributes = self._attributes[id(step)] = {
                **self._task,
                "step": step.name,
                "max_attempts": step.max_attempts,
                "backoff": step.backoff.first,
                "backoff_multiplier": step.backoff.factor,
                "backoff_cap": step.backoff.cap,
            }
            if step.timeout is not None:
                attributes["timeout"] = step.timeout
            if step.name in OPERATIONS:
                attributes |= self._messaging.of_span(step.name)
        return attributes


def _mark_failed(span: Span, message: Any, category: Any) -> None:
    if not span.is_recording():
        return
    text = redact(show(message))
    span.set_attribute("exception.message", text)
    if category is not None:
        span.set_attribute("category", str(category))
    span.set_status(Status(StatusCode.ERROR, text))


def _message(error: BaseException) -> str:
    try:
        return getattr(error, "message", None) or str(error) or type(error).__name__
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the error
        return f"{type(error).__name__}, which cannot be shown"


def _describe_limit(step: Any, limit: str) -> tuple[str, str | None]:
    """Which limit ended an attempt, and the category of that."""
    if limit == "hurry":
        return "cut off because the run is ending", None
    if limit == "step":
        return f"took longer than {step.timeout} s", "TIMEOUT"
    return f"the {'loop' if limit == 'loop' else 'lifecycle'} ran out of time", "TIMEOUT"


def _remote_context(transaction: Any) -> otel.Context | None:
    """The context of the span that sent the transaction; None if it carries none."""
    metadata = transaction.metadata
    if "traceparent" not in metadata:
        return None
    headers = ("traceparent", "tracestate")
    carrier = {key: metadata[key] for key in headers if isinstance(metadata.get(key), str)}
    remote = _propagator.extract(carrier, otel.Context())
    return remote if trace.get_current_span(remote).get_span_context().is_valid else None
