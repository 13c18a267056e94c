"""Settling deliveries: done, returned, failed, dead-lettered."""

from __future__ import annotations

from typing import Any

import pytest

from onceward.connectors.lease_rules import JITTER, BurialReason, LeaseRules, RedeliveryPlan
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.testing.connectors.samples import BUSINESS_FAILURE, SYSTEM_FAILURE, numbered, payloads_of
from onceward.testing.connectors.suite import ConnectorSuite
from onceward.transaction import Settlement, Transaction, Verdict


class Outcomes(ConnectorSuite):
    def test_what_is_done_never_comes_back(self) -> None:
        with self.queue(lease=60.0) as (queue, clock):
            queue.dispatch(*numbered(0, 3))
            queue.done(*queue.fetch())
            self.advance(clock, 600.0)
            assert queue.fetch() == []
            assert self.dead_letters(queue) == []

    def test_what_is_returned_comes_back_at_once_and_at_its_old_place(self) -> None:
        with self.queue() as (queue, _):
            queue.dispatch(*numbered(0, 4))
            queue.give_back(*queue.fetch(2))
            assert payloads_of(queue.fetch()) == [0, 1, 2, 3]

    def test_returning_does_not_count_as_a_delivery(self) -> None:
        with self.queue(max_deliveries=2) as (queue, _):
            queue.dispatch(Transaction())
            for _ in range(5):
                queue.give_back(*queue.fetch())
            assert len(queue.fetch()) == 1
            assert self.dead_letters(queue) == []

    def test_what_is_returned_for_later_comes_back_then_and_does_not_count_as_a_delivery(self) -> None:
        with self.queue(max_deliveries=2, lease=60.0) as (queue, clock):
            queue.dispatch(Transaction())
            for _ in range(4):
                [later] = queue.fetch()
                queue.settle([Settlement(later, Verdict.RETURNED, delay=10.0)])
                self.advance(clock, 9.5)
                assert queue.fetch() == [], "it came back too early"
                self.advance(clock, 1.0)
            assert len(queue.fetch()) == 1
            assert self.dead_letters(queue) == []

    @pytest.mark.req("OU-05")
    def test_what_an_outage_gives_back_counts_neither_as_delivered_nor_as_lost(self) -> None:
        with self.queue(max_deliveries=2, redelivery_delay=1.0, lease=60.0) as (queue, clock):
            queue.dispatch(Transaction())
            queue.fail(*queue.fetch(), error=SYSTEM_FAILURE)
            self.advance(clock, 1.5)
            for _ in range(8):
                [later] = queue.fetch()
                queue.settle([Settlement(later, Verdict.RETURNED, delay=1.0)])
                self.advance(clock, 1.5)
            assert self.dead_letters(queue) == []
            queue.fail(*queue.fetch(), error=SYSTEM_FAILURE)
            [letter] = self.dead_letters(queue)
            assert (letter.reason, letter.deliveries) == (BurialReason.MAX_DELIVERIES, 2)

    def test_a_system_failure_comes_back_after_a_delay_that_doubles_and_has_jitter(self) -> None:
        with self.queue(redelivery_delay=10.0, max_deliveries=10, lease=600.0) as (queue, clock):
            queue.dispatch(Transaction())
            [held] = queue.fetch()
            for delay in (10.0, 20.0, 40.0):
                queue.fail(held, error=SYSTEM_FAILURE)
                self.advance(clock, delay * (1 - JITTER) - 0.5)
                assert queue.fetch() == [], "it came back too early"
                self.advance(clock, delay * JITTER + 1.0)
                [held] = queue.fetch()

    @pytest.mark.req("CN-12")
    def test_a_message_that_always_fails_has_all_the_time_of_its_rules_however_short_the_lease(self) -> None:
        settings: dict[str, Any] = {"redelivery_delay": 50.0, "max_deliveries": 4, "lease": 20.0}
        delays = LeaseRules(**settings).shortest_delays()
        with self.queue(**settings) as (queue, clock):
            queue.dispatch(Transaction())
            for delay in delays:
                queue.fail(*queue.fetch(), error=SYSTEM_FAILURE)
                self.advance(clock, delay - 0.5)
                assert queue.fetch() == [], "it came back too early"
                self.advance(clock, delay / (1 - JITTER) * JITTER + 1.0)
            queue.fail(*queue.fetch(), error=SYSTEM_FAILURE)
            [letter] = self.dead_letters(queue)
            assert (letter.reason, letter.deliveries) == (BurialReason.MAX_DELIVERIES, 4)

    @pytest.mark.req("CN-12")
    def test_what_is_returned_for_longer_than_the_lease_comes_back_then(self) -> None:
        with self.queue(max_deliveries=2, lease=20.0) as (queue, clock):
            queue.dispatch(Transaction())
            for _ in range(3):
                queue.settle([Settlement(each, Verdict.RETURNED, delay=90.0) for each in queue.fetch()])
                self.advance(clock, 89.0)
                assert queue.fetch() == [], "it came back too early"
                self.advance(clock, 2.0)
            assert len(queue.fetch()) == 1
            assert self.dead_letters(queue) == []

    @pytest.mark.req("OU-02")
    def test_a_failure_says_when_its_message_comes_back_and_how_often(self) -> None:
        with self.queue(redelivery_delay=1.0, max_deliveries=10, lease=600.0) as (queue, clock):
            queue.dispatch(Transaction())
            later = TransactionException("too many requests", ExceptionCategory.SYSTEM)
            later.redelivery = RedeliveryPlan(not_before=30.0)
            queue.fail(*queue.fetch(), error=later)
            self.advance(clock, 29.5)
            assert queue.fetch() == [], "it came back too early"
            self.advance(clock, 1.0)
            scheduled = TransactionException("down", ExceptionCategory.SYSTEM)
            scheduled.redelivery = RedeliveryPlan((5.0, 20.0), 2)
            queue.fail(*queue.fetch(), error=scheduled)
            self.advance(clock, 19.5)
            assert queue.fetch() == [], "it came back too early"
            self.advance(clock, 20.0 * JITTER + 1.0)
            queue.fail(*queue.fetch(), error=scheduled)
            [letter] = self.dead_letters(queue)
            assert (letter.reason, letter.deliveries) == (BurialReason.MAX_DELIVERIES, 3)

    def test_a_failed_message_does_not_hold_up_those_behind_it(self) -> None:
        with self.queue(redelivery_delay=10.0) as (queue, clock):
            queue.dispatch(*numbered(0, 3))
            queue.fail(*queue.fetch(1))
            behind = queue.fetch()
            self.advance(clock, 10.5)
            assert payloads_of(behind + queue.fetch()) == [1, 2, 0]

    def test_a_failure_without_a_reason_counts_as_a_system_failure(self) -> None:
        with self.queue(redelivery_delay=1.0) as (queue, clock):
            queue.dispatch(Transaction())
            queue.fail(*queue.fetch(), error=None)
            self.advance(clock, 1.5)
            assert len(queue.fetch()) == 1

    def test_a_business_failure_is_a_dead_letter_at_once(self) -> None:
        with self.queue() as (queue, clock):
            sent = Transaction(payload={"card": "expired"}, metadata={"tenant": "a"})
            queue.dispatch(sent)
            queue.fail(*queue.fetch(), error=BUSINESS_FAILURE)
            self.advance(clock, 600.0)
            assert queue.fetch() == []
            [letter] = self.dead_letters(queue)
            assert letter.transaction_id == sent.id
            assert letter.transaction == sent
            assert letter.reason is BurialReason.FAILED
            assert letter.category is ExceptionCategory.BUSINESS
            assert letter.error is not None
            assert "card expired" in letter.error
            assert letter.deliveries == 1
            assert letter.enqueued_at <= letter.died_at

    def test_repeated_system_failures_end_as_a_dead_letter(self) -> None:
        with self.queue(max_deliveries=3, redelivery_delay=1.0) as (queue, clock):
            queue.dispatch(Transaction())
            for _ in range(3):
                queue.fail(*queue.fetch(), error=SYSTEM_FAILURE)
                self.advance(clock, 61.0)
            assert queue.fetch() == []
            [letter] = self.dead_letters(queue)
            assert letter.reason is BurialReason.MAX_DELIVERIES
            assert (letter.category, letter.deliveries) == (ExceptionCategory.SYSTEM, 3)

    def test_on_failure_dead_letter_buries_every_failure_at_once(self) -> None:
        with self.queue(on_failure="dead_letter") as (queue, _):
            queue.dispatch(Transaction())
            queue.fail(*queue.fetch(), error=SYSTEM_FAILURE)
            [letter] = self.dead_letters(queue)
            assert (letter.reason, letter.category) == (BurialReason.FAILED, ExceptionCategory.SYSTEM)

    def test_on_failure_redeliver_delivers_business_failures_again(self) -> None:
        with self.queue(on_failure="redeliver", max_deliveries=2) as (queue, clock):
            queue.dispatch(Transaction())
            queue.fail(*queue.fetch(), error=BUSINESS_FAILURE)
            self.advance(clock, 61.0)
            queue.fail(*queue.fetch(), error=BUSINESS_FAILURE)
            [letter] = self.dead_letters(queue)
            assert (letter.reason, letter.deliveries) == (BurialReason.MAX_DELIVERIES, 2)

    def test_an_error_text_that_is_no_valid_text_is_kept_readably(self) -> None:
        with self.queue() as (queue, _):
            queue.dispatch(Transaction())
            queue.fail(*queue.fetch(), error=TransactionException("half \ud83d", ExceptionCategory.BUSINESS))
            [letter] = self.dead_letters(queue)
            assert letter.error is not None
            assert "half" in letter.error

    def test_settling_twice_changes_nothing(self) -> None:
        with self.queue(on_failure="dead_letter") as (queue, clock):
            queue.dispatch(*numbered(0, 2))
            first, second = queue.fetch()
            queue.settle([Settlement(first, Verdict.DONE), Settlement(first, Verdict.FAILED)])
            queue.fail(first)
            queue.give_back(second)
            queue.done(second)
            queue.extend(first, second)
            self.advance(clock, 600.0)
            assert payloads_of(queue.fetch()) == [1]
            assert self.dead_letters(queue) == []

    def test_only_what_was_fetched_here_can_be_settled_and_nothing_else_is_then(self) -> None:
        with self.queue(lease=60.0) as (queue, clock):
            sent = Transaction()
            queue.dispatch(sent)
            fetched = queue.fetch()
            with pytest.raises(ValueError, match=sent.id):
                queue.done(*fetched, sent)
            with pytest.raises(ValueError, match=sent.id):
                queue.extend(*fetched, sent)
            self.advance(clock, 61.0)
            assert queue.fetch() == [sent]

    def test_the_same_id_twice_is_two_deliveries(self) -> None:
        with self.queue(lease=60.0) as (queue, clock):
            queue.dispatch(Transaction("same", "a"), Transaction("same", "a"))
            first, second = queue.fetch()
            queue.done(second)
            self.advance(clock, 61.0)
            again = queue.fetch()
            assert again == [first]
            queue.done(*again)
            self.advance(clock, 61.0)
            assert queue.fetch() == []
