"""A delivery that is not settled comes back, once, when its lease expires."""

from __future__ import annotations

import logging

import pytest

from onceward.testing.connectors.samples import numbered, payloads_of
from onceward.testing.connectors.suite import ConnectorSuite
from onceward.transaction import Transaction


class Redelivery(ConnectorSuite):
    def test_what_is_not_settled_comes_back_when_its_lease_runs_out(self) -> None:
        with self.queue(lease=60.0) as (queue, clock):
            queue.dispatch(*numbered(0, 3))
            queue.fetch()
            self.advance(clock, 59.0)
            assert queue.fetch() == []
            self.advance(clock, 2.0)
            assert payloads_of(queue.fetch()) == [0, 1, 2]

    def test_an_extended_lease_lasts_a_whole_lease_from_then(self) -> None:
        with self.queue(lease=60.0) as (queue, clock):
            queue.dispatch(Transaction())
            fetched = queue.fetch()
            for _ in range(3):
                self.advance(clock, 50.0)
                queue.extend(*fetched)
            queue.extend(*fetched)
            self.advance(clock, 59.0)
            assert queue.fetch() == []
            self.advance(clock, 2.0)
            assert len(queue.fetch()) == 1

    def test_an_outcome_that_comes_after_the_lease_was_lost_changes_nothing_and_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.queue(lease=60.0) as (queue, clock):
            queue.dispatch(*numbered(0, 2))
            late, kept = queue.fetch()
            self.advance(clock, 59.0)
            queue.extend(kept)
            self.advance(clock, 2.0)
            [again] = queue.fetch()
            with caplog.at_level(logging.WARNING):
                queue.done(late, kept)
            assert [late.id in record.getMessage() for record in caplog.records] == [True]
            queue.give_back(again)
            assert queue.fetch() == [late]

    def test_extending_a_lost_lease_changes_nothing_and_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.queue(lease=60.0) as (queue, clock):
            queue.dispatch(Transaction())
            [late] = queue.fetch()
            self.advance(clock, 61.0)
            [again] = queue.fetch()
            self.advance(clock, 50.0)
            with caplog.at_level(logging.WARNING):
                queue.extend(late)
            assert [late.id in record.getMessage() for record in caplog.records] == [True]
            self.advance(clock, 11.0)
            assert queue.fetch() == [again]
