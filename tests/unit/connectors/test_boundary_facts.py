"""Facts as transactions and back: what is carried, what is reported on arrival, and what is refused before sending."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from onceward import Transaction
from onceward.boundary import Envelope, Fact, StoredFact
from onceward.connectors import PayloadError
from onceward.connectors.boundary.facts import as_body, as_fact, as_transaction
from onceward.connectors.codec import DecodeError, decode
from onceward.inbox.event import Event

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FACT = {
    "subject": "batch:B1042",
    "predicate": "step_completed",
    "object": {"step": 7, "name": "Köln", "x": [1.5]},
}


def sent(transaction: Transaction, trace: dict[str, str] | None = None, offset: int = 1) -> StoredFact:
    envelope, fact = as_fact(transaction, ("plant-a", "hq"), trace or {})
    return StoredFact(offset=offset, envelope=envelope, fact=fact, appended_at_unix_ms=1)


def stored(**envelope: Any) -> StoredFact:
    fact = Fact(subject="batch:B1042", predicate="made", object_json="{}")
    values = {
        "message_id": "m1",
        "from_zone": "plant-a",
        "to_zone": "hq",
        "produced_at_unix_ms": 1,
        **envelope,
    }
    return StoredFact(offset=1, envelope=Envelope(**values), fact=fact, appended_at_unix_ms=1)


def test_a_transaction_comes_back_as_it_was_to_the_millisecond() -> None:
    began = Transaction(
        id="m1",
        payload=FACT,
        metadata={
            "tenant": "a",
            "sequence": 7,
            "schema_version": 2,
            "object_schema": "step/2",
            "baggage": "k=v",
        },
        created_at=datetime(2026, 1, 31, 12, 0, 0, 123_987, UTC),
        correlation_id="c1",
        parent_id="p1",
    )
    again = as_transaction(sent(began, offset=5))
    assert (again.id, again.payload) == ("m1", FACT)
    assert (again.correlation_id, again.parent_id) == ("c1", "p1")
    assert again.created_at == datetime(2026, 1, 31, 12, 0, 0, 123_000, UTC)
    output = {"event_type": "step_completed", "aggregate_id": "batch:B1042", "offset": 5}
    assert again.metadata == {**began.metadata, **output, "from_zone": "plant-a", "to_zone": "hq"}
    assert again.source == "plant-a"
    assert as_transaction(sent(again, offset=5)) == again, "it can be dispatched again, and is the same"


def test_the_inbox_sees_the_event_that_the_fact_is() -> None:
    event = Event.of(as_transaction(sent(Transaction("m1", FACT, {"sequence": 7, "schema_version": 2}))))
    assert (event.tracking_id, event.event_type, event.aggregate_id) == (
        "m1",
        "step_completed",
        "batch:B1042",
    )
    assert (event.sequence, event.schema_version) == (7, 2)


def test_the_current_trace_replaces_the_one_it_came_with() -> None:
    old = {"traceparent": "of an earlier hop", "tracestate": "old=1", "baggage": "k=v"}
    again = as_transaction(sent(Transaction("m1", FACT, old), {"traceparent": TRACEPARENT}))
    assert (again.metadata["traceparent"], again.metadata["baggage"]) == (TRACEPARENT, "k=v")
    assert "tracestate" not in again.metadata


def test_labels_from_outside_are_sanitised(caplog: pytest.LogCaptureFixture) -> None:
    labels = {"Authorization": "Bearer abc", "traceparent": "nonsense", "sequence": "many", "offset": "9"}
    arrived = as_transaction(stored(labels=labels))
    assert arrived.metadata.keys() == {
        "sequence",
        "event_type",
        "aggregate_id",
        "offset",
        "from_zone",
        "to_zone",
    }
    assert (arrived.metadata["sequence"], arrived.metadata["offset"]) == ("many", 1)
    assert "Bearer" not in caplog.text


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (None, "subject, predicate and object"),
        ({"subject": "a:b", "predicate": "c"}, "subject, predicate and object"),
        ({**FACT, "more": 1}, "nothing else"),
        ({**FACT, "subject": "no kind"}, r"fact\.subject"),
        ({**FACT, "predicate": "CamelCase"}, r"fact\.predicate"),
        ({**FACT, "subject": 7}, "cannot be appended"),
        ({**FACT, "object": float("nan")}, "object cannot be stored"),
        ({**FACT, "object": (1, 2)}, "come back changed"),
        ({**FACT, "object": {1: "x"}}, "come back changed"),
        ({**FACT, "object": b"bytes"}, "object cannot be stored"),
        ({**FACT, "object": 2**60 + 1}, "object cannot be stored"),
        ({**FACT, "object": "half \ud83d"}, "object cannot be stored"),
        ({**FACT, "object": datetime(2026, 1, 1, tzinfo=UTC)}, "object cannot be stored"),
    ],
)
def test_what_is_no_fact_is_refused_and_named(payload: Any, problem: str) -> None:
    with pytest.raises(PayloadError, match=f"'the-bad-one'.*{problem}"):
        sent(Transaction("the-bad-one", payload))


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"Authorization": "Bearer abc"}, "'Authorization' .* credential"),
        ({"tenant": 7}, "'tenant' .* int"),
        ({"sequence": -1}, "'sequence'"),
        ({"event_type": "order.paid"}, "event_type .* predicate"),
        ({"aggregate_id": "other"}, "aggregate_id .* subject"),
        ({"baggage": "x" * 5000}, r"envelope\.labels"),
        ({"object_schema": 7}, "cannot be appended"),
    ],
)
def test_metadata_that_labels_cannot_carry_is_refused_and_named(metadata: Any, problem: str) -> None:
    with pytest.raises(PayloadError, match=f"'the-bad-one'.*{problem}") as caught:
        sent(Transaction("the-bad-one", FACT, metadata))
    assert "Bearer" not in str(caught.value)


def test_an_id_that_the_boundary_would_refuse_is_refused_here() -> None:
    with pytest.raises(PayloadError, match=r"envelope\.message_id"):
        sent(Transaction("x" * 500, FACT))


def test_a_fact_that_no_transaction_can_hold_is_kept_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Nanoseconds passed as milliseconds: a time outside of the calendar."""
    odd = stored(produced_at_unix_ms=1_700_000_000_000_000_000)
    with caplog.at_level(logging.ERROR):
        body = as_body(odd)
    assert "fact m1 at offset 1" in caplog.text
    assert msgspec.json.decode(body, type=StoredFact) == odd
    with pytest.raises(DecodeError):
        decode(body)
