"""Turn the engine's hooks into spans and metrics. Used only if an OpenTelemetry SDK is set up.

The engine calls `life_begins`, `step_begins`, … in the transaction's own context. Contexts are restored by value, not
detached by token: a context is discarded with its transaction, and a life that moves to another thread could not
use the tokens of the first thread's context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace import Link, Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from onceward.middleware import Middleware, StepCall
from onceward.telemetry import metrics
from onceward.telemetry.catalogue import RETRY_EVENT, SCOPE
from onceward.telemetry.context import attempt_expired, attempt_hurried, current_attempt, current_work
from onceward.telemetry.metrics import EngineInstruments, instruments

LONGEST = 256
"""Characters a field may show on a span."""

_MISSING = object()
_propagator = TraceContextTextMapPropagator()


class Names(NamedTuple):
    """The span names of a call and its transactions, and the settings and fields the spans show."""

    task: str
    loop: str
    life: str
    settings: dict[str, Any]
    fields: tuple[str, ...]


class LifeSpans:
    """The open spans of one transaction, and the contexts inside them."""

    __slots__ = ("inside_life", "inside_step", "life", "step")

    def __init__(self, life: Span, inside: otel.Context) -> None:
        self.life = life
        self.inside_life = inside
        self.step: Span | None = None
        self.inside_step = inside


class EngineSpans(Middleware):
    """Records spans and metrics of each attempt, if an OpenTelemetry SDK is set up."""

    name = "telemetry"

    @classmethod
    def create_if_enabled(cls, names: Names) -> EngineSpans | None:
        """Return None if no OpenTelemetry SDK is set up."""
        tracers, meters = metrics.tracer_provider(), metrics.meter_provider()
        if tracers is None and meters is None:
            return None
        return cls(
            names, tracers or trace.NoOpTracerProvider(), None if meters is None else instruments(meters)
        )

    def __init__(
        self, names: Names, tracers: trace.TracerProvider, metrics: EngineInstruments | None
    ) -> None:
        self._names = names
        self._tracer = tracers.get_tracer(SCOPE)
        self._metrics = metrics
        self._fields = SpanFields(names.fields)
        self._task = {"task": names.task}
        self._attributes: dict[int, dict[str, Any]] = {}
        self._counted = (0, 0, 0)
        self._loop_span: Span
        self._inside_loop: otel.Context

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────

    def loop_begins(self, in_use: Callable[[], int]) -> None:
        attributes = {**self._task, **self._names.settings}
        self._loop_span = self._tracer.start_span(self._names.loop, attributes=attributes)
        self._inside_loop = trace.set_span_in_context(self._loop_span)
        otel.attach(self._inside_loop)
        if self._metrics is not None:
            self._metrics.slots_in_use[id(self)] = (self._names.task, in_use)

    def loop_ends(self, report: Any, error: BaseException | None) -> None:
        self.count(report)
        span = self._loop_span
        span.set_attributes(
            {
                "processed": report.processed,
                "succeeded": report.succeeded,
                "failed": report.failed,
                "duplicates": report.duplicates,
                "postponed": report.postponed,
                "stop_reason": str(report.stop_reason),
            }
        )
        if error is not None:
            _mark_failed(span, str(error) or type(error).__name__, None)
        span.end()
        metrics = self._metrics
        if metrics is not None:
            metrics.slots_in_use.pop(id(self), None)
            for category, count in report.failed_by_category.items():
                if count:
                    metrics.failed.add(count, {**self._task, "category": str(category)})
            if report.abandoned:
                metrics.abandoned.add(report.abandoned, self._task)

    def count(self, tally: Any) -> None:
        """Add what the tally gained since the last call: once per batch, not per transaction."""
        if self._metrics is None:
            return
        now = (tally.succeeded, tally.failed, tally.fetches)
        succeeded, failed, fetches = (new - old for new, old in zip(now, self._counted, strict=True))
        self._counted = now
        if succeeded:
            self._metrics.succeeded.add(succeeded, self._task)
        if succeeded or failed:
            self._metrics.processed.add(succeeded + failed, self._task)
        if fetches:
            self._metrics.fetches.add(fetches, self._task)

    def ask_begins(self, loop: Any, step: Any) -> tuple[Span, float]:
        attributes = {**self._static(step), "attempt": loop.attempt, "batch_size": loop.policy.batch.size}
        span = self._tracer.start_span(step.span, self._inside_loop, attributes=attributes)
        otel.attach(trace.set_span_in_context(span, self._inside_loop))
        return span, perf_counter()

    def ask_ends(self, begun: tuple[Span, float], step: Any, error: Any, delay: float | None) -> None:
        span, since = begun
        otel.attach(self._inside_loop)
        if error is not None:
            _mark_failed(span, error.message, error.category)
        span.end()
        if self._metrics is not None:
            self._metrics.duration.record(perf_counter() - since, {**self._task, "step": step.name})
            if delay is not None:
                self._metrics.retries.add(1, {**self._task, "step": step.name})

    def record_empty_fetch(self) -> None:
        if self._metrics is not None:
            self._metrics.empty_fetches.add(1, self._task)

    def record_backoff(self, step: str, seconds: float) -> None:
        if self._metrics is not None and seconds:
            self._metrics.backoff.add(seconds, {**self._task, "step": step})

    # ── a transaction ───────────────────────────────────────────────────────────────────────────────────

    def life_begins(self, life: Any) -> None:
        transaction = life.transaction
        parent, links = self._inside_loop, None
        if "traceparent" in transaction.metadata:
            remote = _propagator.extract(_carrier(transaction.metadata), otel.Context())
            if trace.get_current_span(remote).get_span_context().is_valid:
                # Continue the producer's trace; the batch it arrived in is only linked.
                parent, links = remote, [Link(self._loop_span.get_span_context())]
        attributes = {**self._task, "transaction_id": transaction.id}
        if self._fields:
            attributes.update(self._fields.of_transaction(transaction))
        span = self._tracer.start_span(self._names.life, parent, attributes=attributes, links=links)
        inside = trace.set_span_in_context(span, parent)
        life.spans = LifeSpans(span, inside)
        otel.attach(inside)

    def life_ends(self, life: Any, outcome: Any) -> None:
        span = life.spans.life
        if outcome is None:
            span.set_attribute("outcome", "abandoned")
        else:
            span.set_attribute("outcome", str(outcome.status))
            if outcome.duplicate:
                span.set_attribute("duplicate", True)
            if outcome.error is not None:
                _mark_failed(span, outcome.error.message, outcome.error.category)
        span.end()

    def step_begins(self, life: Any, step: Any) -> None:
        spans: LifeSpans = life.spans
        if step.has_attempt_spans:
            attributes = {**self._static(step), "transaction_id": life.transaction_id}
            spans.step = self._tracer.start_span(step.span, spans.inside_life, attributes=attributes)
            spans.inside_step = trace.set_span_in_context(spans.step, spans.inside_life)
        otel.attach(spans.inside_step)

    def step_ends(self, life: Any, step: Any, error: Any) -> None:
        spans: LifeSpans = life.spans
        if spans.step is not None:
            spans.step.set_attribute("attempts", life.attempt + 1)
            if error is not None:
                _mark_failed(spans.step, error.message, error.category)
            spans.step.end()
            spans.step, spans.inside_step = None, spans.inside_life
        otel.attach(spans.inside_life)

    def record_retry(self, life: Any, step: Any, delay: float) -> None:
        """Record that another attempt follows after `delay` seconds."""
        if life.spans.life.is_recording():
            life.spans.life.add_event(
                RETRY_EVENT, {"step": step.name, "attempt": life.attempt, "delay": delay}
            )
        if self._metrics is not None:
            self._metrics.retries.add(1, {**self._task, "step": step.name})
            self.record_backoff(step.name, delay)

    def record_timeout(self, step: str, limit: str) -> None:
        if self._metrics is not None:
            self._metrics.timeouts.add(1, {**self._task, "step": step, "limit": str(limit)})

    def change_stuck(self, change: int) -> None:
        if self._metrics is not None:
            self._metrics.stuck.add(change, self._task)

    # ── an attempt ──────────────────────────────────────────────────────────────────────────────────────

    def wrap_step(self, step: Any, call: StepCall) -> StepCall:
        """Record a span and a duration for each attempt."""

        async def attempt(*arguments: Any) -> Any:
            begun = self._attempt_begins(step)
            try:
                result = await call(*arguments)
            except BaseException as error:
                self._attempt_ends(begun, step, error)
                raise
            self._attempt_ends(begun, step, None, result)
            return result

        return attempt

    def _attempt_begins(self, step: Any) -> tuple[Span, otel.Context, float]:
        life: Any = current_work.get()
        parent = life.spans.inside_step
        attributes = {**self._static(step), "transaction_id": life.transaction_id, "attempt": life.attempt}
        name = f"{step.span}.attempt" if step.has_attempt_spans else step.span
        span = self._tracer.start_span(name, parent, attributes=attributes)
        otel.attach(trace.set_span_in_context(span, parent))
        return span, parent, perf_counter()

    def _attempt_ends(
        self,
        attempt: tuple[Span, otel.Context, float],
        step: Any,
        error: BaseException | None,
        result: Any = None,
    ) -> None:
        span, parent, since = attempt
        otel.attach(parent)
        if attempt_hurried():
            _mark_failed(span, "cut off because the run is ending", None)
        elif attempt_expired():
            _mark_failed(span, _describe_limit(step), "TIMEOUT")
        elif error is not None:
            category = step.category_of(error)
            if category is None:
                span.set_attribute("outcome", "postponed")
            else:
                _mark_failed(span, _message(error), category)
        elif self._fields and step.name in ("process", "produce"):
            span.set_attributes(self._fields.of_result(result))
        span.end()
        if self._metrics is not None:
            self._metrics.duration.record(perf_counter() - since, {**self._task, "step": step.name})

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
        return attributes


class SpanFields:
    """The fields that spans may show, by path, such as `payload.order_id` or `result.total`; the path is the key."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._paths = [(name, name.split(".")) for name in names]

    def __bool__(self) -> bool:
        return bool(self._paths)

    def of_transaction(self, transaction: Any) -> dict[str, Any]:
        return self._read({"payload": transaction.payload, "metadata": transaction.metadata})

    def of_result(self, result: Any) -> dict[str, Any]:
        return self._read({"result": result})

    def _read(self, roots: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (root, *path) in self._paths:
            value = roots.get(root, _MISSING)
            for key in path:
                value = _step(value, key)
            if value is not _MISSING and value is not None:
                found[name] = value if isinstance(value, (bool, int, float)) else str(value)[:LONGEST]
        return found


def _step(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(key, _MISSING)
    return getattr(value, key, _MISSING) if value is not _MISSING else _MISSING


def _mark_failed(span: Span, message: str, category: Any) -> None:
    if not span.is_recording():
        return
    span.set_attribute("exception.message", message)
    if category is not None:
        span.set_attribute("category", str(category))
    span.set_status(Status(StatusCode.ERROR, message))


def _message(error: BaseException) -> str:
    return getattr(error, "message", None) or str(error) or type(error).__name__


def _describe_limit(step: Any) -> str:
    """Which limit ended the running attempt."""
    attempt = current_attempt.get()
    if attempt is None or attempt.limit == "step":
        return f"took longer than {step.timeout} s"
    return f"the {'loop' if attempt.limit == 'loop' else 'lifecycle'} ran out of time"


def _carrier(metadata: Any) -> dict[str, str]:
    return {key: metadata[key] for key in ("traceparent", "tracestate") if isinstance(metadata.get(key), str)}
