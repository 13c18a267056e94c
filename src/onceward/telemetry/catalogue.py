"""Every span, metric and attribute that onceward emits, by name. It emits nothing else.

Spans of a consumer:                        Spans of a producer:

    consume_transactions                        produce_transactions
    ├── fetch_transactions    (per attempt)     └── start_producing            (per transaction)
    ├── settle_transactions   (per attempt)         ├── produce
    ├── extend_transactions   (per attempt)         │   └── produce.attempt
    └── start_processing      (per transaction)     ├── handle_produce_success
        ├── process           (per attempt)         │   └── handle_produce_success.attempt
        ├── handle_success    (per attempt)         └── handle_produce_exception
        └── handle_exception  (per attempt)             └── handle_produce_exception.attempt

A transaction's span has the kind CONSUMER or PRODUCER, and the attributes of the semantic conventions for messaging
(`messaging.…`); fetching and settling are CLIENT spans.

A transaction that carries a trace context continues that trace: its `start_processing` is a child of the
producer's span, and linked to `consume_transactions`. All spans of a transaction are in one trace.

Payloads, results, metadata and credentials never appear on spans, metrics or log lines, except the fields listed
in `EngineSettings.telemetry_fields`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SCOPE: Final = "onceward"
"""The instrumentation scope of every tracer and meter."""

SPAN_ATTRIBUTES: Final = {
    "task": "class name of the task",
    "step": "fetch, settle, extend, process, produce, success or exception",
    "attempt": "number of the attempt, from 0",
    "max_attempts": "how many attempts the policy allows, the first included",
    "attempts": "how many attempts a step took (step spans of a producer)",
    "timeout": "seconds each attempt may take; absent when unlimited",
    "backoff": "seconds before the first retry",
    "backoff_multiplier": "factor from one delay to the next",
    "backoff_cap": "longest delay, 0 when uncapped",
    "transaction_id": "id of the transaction",
    "category": "BUSINESS, SYSTEM or TIMEOUT, when something failed",
    "exception.message": "what failed, when something did",
    "outcome": "succeeded, failed, postponed or abandoned (one span per transaction); postponed (attempts)",
    "consumer": "consumer_id of the contract",
    "tracking_id": "id of the event, for a consumer with a contract",
    "event_type": "type of the event, for a consumer with a contract",
    "batch_size": "transactions taken in at once, or asked for",
    "concurrency": "transactions in flight at once",
    "limit": "transactions to start at most; absent when unlimited",
    "loop_timeout": "seconds the call may take; absent when unlimited",
    "transaction_timeout": "seconds one lifecycle may take; absent when unlimited",
    "mode": "batch or continuous (consumers)",
    "streaming": "whether the loop waits for more (consumers)",
    "processed": "transactions that came to an outcome (loop spans)",
    "succeeded": "of those, how many succeeded (loop spans)",
    "duplicates": "of those, how many had been done before (loop spans)",
    "postponed": "transactions that went back to their source for later (loop spans)",
    "duplicate": "true when a transaction had been done before",
    "failed": "of those, how many failed (loop spans)",
    "stop_reason": "why the loop ended (loop spans)",
    "messaging.system": "sqlite, redis, postgresql, nats or onceward_boundary, in an app",
    "messaging.destination.name": "the queue, stream or log, in an app",
    "messaging.operation.name": "process, send, fetch or settle",
    "messaging.operation.type": "the same in the words of the conventions: process, send, receive or settle",
    "messaging.message.id": "id of the transaction, as the conventions name it",
    "messaging.consumer.group.name": "the group or durable name of a consumer, if its source has any",
    "messaging.batch.message_count": "messages that a fetch returned, or that are settled together",
}

RETRY_EVENT: Final = "retry"
"""Span event on a transaction's span: another attempt follows. Attributes: step, attempt, delay."""


class Metric(NamedTuple):
    kind: str
    unit: str
    description: str
    attributes: tuple[str, ...]


OF_MESSAGING: Final = (
    "messaging.system", "messaging.destination.name", "messaging.operation.name", "messaging.consumer.group.name",
    "error.type",
)  # fmt: skip
"""Attributes of the metrics that the semantic conventions for messaging define; `error.type` only of failures."""

METRICS: Final = {
    "onceward.transactions.processed": Metric("counter", "{transaction}", "came to an outcome", ("task",)),
    "onceward.transactions.succeeded": Metric("counter", "{transaction}", "ended in success", ("task",)),
    "onceward.transactions.failed": Metric(
        "counter", "{transaction}", "ended in failure", ("task", "category")
    ),
    "onceward.transactions.abandoned": Metric(
        "counter", "{transaction}", "cut off without an outcome", ("task",)
    ),
    "onceward.attempts.timeouts": Metric(
        "counter", "{attempt}", "ran out of time", ("task", "step", "limit")
    ),
    "onceward.attempts.retries": Metric("counter", "{attempt}", "followed a failed one", ("task", "step")),
    "onceward.attempts.backoff": Metric("counter", "s", "spent between attempts", ("task", "step")),
    "onceward.step.duration": Metric("histogram", "s", "how long attempts took", ("task", "step")),
    "onceward.fetches": Metric("counter", "{fetch}", "batches asked of the source", ("task",)),
    "onceward.fetches.empty": Metric("counter", "{fetch}", "of those, empty ones", ("task",)),
    "onceward.slots.in_use": Metric("gauge", "{slot}", "transactions in flight now", ("task",)),
    "onceward.slots.stuck": Metric("up_down", "{slot}", "attempts given up on that still run", ("task",)),
    "onceward.inbox.events": Metric(
        "counter", "{event}", "attempts at events, by how they ended", ("consumer", "event_type", "outcome")
    ),
    "onceward.inbox.duplicates": Metric(
        "counter", "{event}", "skipped: done before", ("consumer", "event_type")
    ),
    "onceward.inbox.duration": Metric(
        "histogram", "s", "from an attempt's begin to its commit", ("consumer", "outcome")
    ),
    "onceward.inbox.retries": Metric(
        "histogram", "{attempt}", "attempts before the one that did it", ("consumer",)
    ),
    "onceward.deadletters.buried": Metric("counter", "{letter}", "buried", ("consumer", "category")),
    "onceward.deadletters.alerts": Metric(
        "counter", "{alert}", "alerts about dead letters", ("consumer", "alert")
    ),
    "onceward.deadletters.redriven": Metric(
        "counter", "{letter}", "delivered again, by what came of it", ("consumer", "outcome")
    ),
    "onceward.queue.enqueued": Metric("counter", "{message}", "put on the stream", ("stream", "group")),
    "onceward.queue.read": Metric("counter", "{message}", "read as new", ("stream", "group")),
    "onceward.queue.acked": Metric("counter", "{message}", "acknowledged", ("stream", "group")),
    "onceward.queue.claimed": Metric("counter", "{message}", "claimed as stale", ("stream", "group")),
    "onceward.queue.undecodable": Metric(
        "counter", "{message}", "that could not be read", ("stream", "group")
    ),
    "onceward.queue.failures": Metric(
        "counter", "{call}", "calls Redis failed", ("stream", "group", "operation")
    ),
    "onceward.queue.duration": Metric(
        "histogram", "s", "how long calls took", ("stream", "group", "operation")
    ),
    "messaging.process.duration": Metric("histogram", "s", "how long processing took", OF_MESSAGING),
    "messaging.client.operation.duration": Metric(
        "histogram", "s", "how long fetching, settling and sending took", OF_MESSAGING
    ),
    "messaging.client.sent.messages": Metric(
        "counter", "{message}", "that were sent, or failed to be", OF_MESSAGING
    ),
    "messaging.client.consumed.messages": Metric(
        "counter", "{message}", "that a source delivered", OF_MESSAGING
    ),
}
