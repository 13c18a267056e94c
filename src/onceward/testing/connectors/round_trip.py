"""Dispatching and fetching: transactions come back equal and in order."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace

from onceward.connectors import PayloadError
from onceward.testing.connectors.samples import numbered, payloads_of, transactions
from onceward.testing.connectors.suite import ConnectorSuite
from onceward.transaction import Transaction

SHARE = 4
"""One of this many examples of a test in your profile: each has several transactions."""


class RoundTrip(ConnectorSuite):
    @pytest.mark.hypothesis
    def test_every_transaction_comes_back_equal(self) -> None:
        with self.queue() as (queue, _):

            @settings(
                deadline=None,
                max_examples=settings().max_examples // SHARE,
                suppress_health_check=list(HealthCheck),
            )
            @given(st.lists(transactions(), min_size=1, max_size=5))
            def round_trip(sent: list[Transaction]) -> None:
                queue.dispatch(*sent)
                received = queue.fetch(len(sent))
                queue.done(*received)
                assert received == sent

            round_trip()

    def test_transactions_come_in_the_order_they_were_dispatched(self) -> None:
        with self.queue() as (queue, _):
            queue.dispatch(*numbered(0, 7))
            queue.dispatch(*numbered(7, 10))
            assert payloads_of(queue.fetch(4) + queue.fetch(4) + queue.fetch(4)) == list(range(10))

    def test_a_fetch_gives_at_most_its_batch_size(self) -> None:
        with self.queue() as (queue, _):
            queue.dispatch(*numbered(0, 5))
            assert [len(queue.fetch(2)) for _ in range(4)] == [2, 2, 1, 0]

    def test_an_empty_queue_gives_nothing(self) -> None:
        with self.queue() as (queue, _):
            assert queue.fetch(10) == []

    def test_dispatching_and_settling_nothing_is_fine(self) -> None:
        with self.queue() as (queue, _):
            queue.dispatch()
            queue.settle([])
            queue.extend()
            assert queue.fetch(10) == []

    def test_a_batch_size_below_one_is_refused(self) -> None:
        with self.queue() as (queue, _), pytest.raises(ValueError, match="batch_size"):
            queue.fetch(0)

    def test_an_unknown_fetch_option_is_refused_by_name(self) -> None:
        with self.queue() as (queue, _), pytest.raises(TypeError, match="priorty"):
            queue.fetch(1, priorty="high")

    @pytest.mark.parametrize(
        "bad",
        [(1, 2), {1}, Decimal("1.5"), float("nan"), datetime(2026, 1, 1), 2**64, object(), {"deep": [(1,)]}],
        ids=lambda bad: type(bad).__name__,
    )
    def test_one_bad_payload_keeps_the_whole_dispatch_from_happening(self, bad: Any) -> None:
        with self.queue() as (queue, _):
            with pytest.raises(PayloadError, match="the-bad-one"):
                queue.dispatch(Transaction(payload="good"), Transaction("the-bad-one", bad))
            assert queue.fetch(10) == []

    def test_credentials_in_metadata_are_refused(self) -> None:
        with self.queue() as (queue, _):
            with pytest.raises(PayloadError, match="Authorization"):
                queue.dispatch(Transaction(metadata={"Authorization": "Bearer abc"}))
            assert queue.fetch(10) == []

    def test_the_current_trace_goes_along(self) -> None:
        context = trace.SpanContext(
            trace_id=0x0AF7651916CD43DD8448EB211C80319C,
            span_id=0xB7AD6B7169203331,
            is_remote=False,
            trace_flags=trace.TraceFlags(1),
            trace_state=trace.TraceState([("vendor", "x")]),
        )
        with self.queue() as (queue, _):
            with trace.use_span(trace.NonRecordingSpan(context)):
                queue.dispatch(Transaction(metadata={"tenant": "a", "traceparent": "of an earlier hop"}))
            [received] = queue.fetch()
            assert received.metadata == {
                "tenant": "a",
                "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "tracestate": "vendor=x",
            }

    def test_without_a_trace_the_metadata_travels_as_it_is(self) -> None:
        metadata = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        with self.queue() as (queue, _):
            queue.dispatch(Transaction(metadata=metadata))
            assert [t.metadata for t in queue.fetch()] == [metadata]
