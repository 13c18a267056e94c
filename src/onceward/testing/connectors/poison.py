"""Messages that always fail are counted, isolated, and in the end buried."""

from __future__ import annotations

import logging

import pytest

from onceward.connectors import BurialReason
from onceward.connectors.codec import decode
from onceward.connectors.lease_rules import LONGEST_DELAY, MOST_LOST
from onceward.testing.connectors.samples import SYSTEM_FAILURE, numbered, payloads_of
from onceward.testing.connectors.suite import ConnectorSuite, needs
from onceward.transaction import Transaction


class ConnectorPoison(ConnectorSuite):
    def test_deliveries_that_never_end_are_counted_and_end_as_a_dead_letter(self) -> None:
        with self.queue(lease=60.0, max_deliveries=3, redelivery_delay=1.0) as (queue, clock):
            queue.dispatch(Transaction("poison"))
            queue.fail(*queue.fetch(), error=SYSTEM_FAILURE)
            for _ in range(2):
                self.advance(clock, 61.0)
                assert len(queue.fetch()) == 1
            self.advance(clock, 61.0)
            assert queue.fetch() == []
            [letter] = self.dead_letters(queue)
            assert (letter.transaction_id, letter.reason) == ("poison", BurialReason.MAX_DELIVERIES)
            assert letter.deliveries == 3
            assert letter.error is not None, "the last known failure is kept"
            assert "went wrong" in letter.error

    def test_a_dead_letter_can_be_moved_elsewhere_with_its_bytes_and_every_failure(self) -> None:
        with self.queue(lease=600.0, max_deliveries=3, redelivery_delay=1.0) as (queue, clock):
            queue.dispatch(Transaction("doomed", {"total": 7}), Transaction("other"))
            for _ in range(3):
                doomed = [each for each in queue.fetch() if each.id == "doomed"]
                queue.fail(*doomed, error=SYSTEM_FAILURE)
                self.advance(clock, 61.0)
            [dead] = queue.call("dead_letters", 10)
            assert decode(dead.body).payload == {"total": 7}
            assert [each.attempt for each in dead.history] == [1, 2, 3]
            assert all("went wrong" in each.error for each in dead.history)
            assert queue.call("dead_letters", 10) == [dead], "it stays until `forget_dead` is called"
            queue.call("forget_dead", [dead.key])
            assert queue.call("dead_letters", 10) == []

    def test_dead_letters_do_not_hide_what_is_behind_them(self) -> None:
        with self.queue(lease=60.0, max_deliveries=1) as (queue, clock):
            queue.dispatch(*numbered(0, 4))
            for _ in range(3):
                queue.fetch()
            self.advance(clock, 61.0)
            assert payloads_of(queue.fetch(1)) == [3]
            assert queue.fetch() == []  # a busy connector may bury a little later, but an idle one must
            assert len(self.dead_letters(queue)) == 3

    @pytest.mark.parametrize("max_deliveries", [1, 2, 3, 5])
    def test_a_message_that_kills_its_process_takes_no_other_with_it(self, max_deliveries: int) -> None:
        """A process that fetches the poison dies without settling any of its batch."""
        with self.queue(lease=60.0, max_deliveries=max_deliveries) as (queue, clock):
            queue.dispatch(*(Transaction(payload=name) for name in ["a", "poison", "b", "c"]))
            survived: list[str] = []
            for _ in range(50):
                batch = queue.fetch(4)
                if "poison" not in payloads_of(batch):
                    queue.done(*batch)
                    survived += payloads_of(batch)
                self.advance(clock, 61.0)
            assert sorted(survived) == ["a", "b", "c"]
            [letter] = self.dead_letters(queue)
            assert letter.transaction is not None
            assert (letter.transaction.payload, letter.deliveries) == ("poison", max_deliveries)

    def test_a_message_whose_lease_was_lost_twice_is_fetched_alone(self) -> None:
        with self.queue(lease=60.0, max_deliveries=5) as (queue, clock):
            queue.dispatch(*numbered(0, 2))
            for _ in range(2):
                queue.fetch(2)
                self.advance(clock, 61.0)
            queue.dispatch(*numbered(2, 4))
            assert [payloads_of(queue.fetch(10)) for _ in range(4)] == [[0], [1], [2, 3], []]

    @pytest.mark.req("PF-03")
    def test_the_engine_learns_which_messages_are_suspects_unless_an_inbox_finds_them(self) -> None:
        with self.queue(lease=60.0, max_deliveries=5) as (queue, clock):
            if not hasattr(queue.connector, "is_suspect"):
                return  # it may leave it out
            queue.dispatch(Transaction(payload="lost"))
            for _ in range(2):
                assert not queue.connector.is_suspect(*queue.fetch())
                self.advance(clock, 61.0)
            queue.dispatch(Transaction(payload="new"))
            suspects = {
                each.payload: queue.connector.is_suspect(each) for _ in range(2) for each in queue.fetch()
            }
            assert suspects == {"lost": True, "new": False}
            if hasattr(queue.connector, "leave_poison_to_inbox"):
                queue.connector.leave_poison_to_inbox()
                self.advance(clock, 61.0)
                assert not any(queue.connector.is_suspect(each) for _ in range(2) for each in queue.fetch())

    @pytest.mark.req("CC-059")
    def test_beside_an_inbox_lost_deliveries_do_not_bury_a_message_and_failures_do(self) -> None:
        """It may only have been near the one that killed the process; the inbox counts the starts of each."""
        with self.queue(lease=60.0, max_deliveries=2, redelivery_delay=1.0) as (queue, clock):
            if not hasattr(queue.connector, "leave_poison_to_inbox"):
                return  # its deliveries are not counted over crashes
            queue.connector.leave_poison_to_inbox()
            queue.dispatch(Transaction("innocent"))
            for _ in range(6):
                assert len(queue.fetch()) == 1
                self.advance(clock, 61.0)
            for _ in range(2):
                queue.fail(*queue.fetch(), error=SYSTEM_FAILURE)
                self.advance(clock, LONGEST_DELAY + 1.0)
            assert queue.fetch() == []
            [letter] = self.dead_letters(queue)
            assert (letter.reason, len(letter.history)) == (BurialReason.MAX_DELIVERIES, 2)

    @pytest.mark.req("CC-059")
    def test_beside_an_inbox_a_message_that_is_lost_over_and_over_is_buried_in_the_end(self) -> None:
        with self.queue(lease=60.0, max_deliveries=2) as (queue, clock):
            if not hasattr(queue.connector, "leave_poison_to_inbox"):
                return
            queue.connector.leave_poison_to_inbox()
            queue.dispatch(Transaction("killer"))
            for _ in range(MOST_LOST):
                assert len(queue.fetch()) == 1
                self.advance(clock, 61.0)
            assert queue.fetch() == []
            assert len(self.dead_letters(queue)) == 1

    @needs("put_raw")
    def test_bytes_that_are_no_transaction_become_a_dead_letter_and_hide_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert self.put_raw is not None
        with self.queue() as (queue, _):
            self.put_raw(queue.connector, b"rubbish")
            queue.dispatch(*numbered(0, 2))
            with caplog.at_level(logging.ERROR):
                assert payloads_of(queue.fetch(1)) == [0]
            assert [record.levelname for record in caplog.records] == ["ERROR"]
            [letter] = self.dead_letters(queue)
            assert (letter.reason, letter.transaction) == (BurialReason.UNDECODABLE, None)
