"""An event that is delivered more than once takes effect once."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest

from onceward.inbox import Breach, Busy, ContractError, Handling, Result
from onceward.testing.inbox.samples import (
    Held,
    contract,
    event,
    never,
    raising,
    together,
    write,
    write_then,
)
from onceward.testing.inbox.suite import InboxSuite


class Duplicates(InboxSuite):
    @pytest.mark.req("CC-002")
    @pytest.mark.parametrize("times", [2, 100])
    def test_a_series_of_copies_takes_effect_once_and_calls_the_handler_once(self, times: int) -> None:
        billing, paid = contract(), event()
        with self.inbox() as inbox:
            first = inbox.process(billing, paid, write)
            again = [inbox.process(billing, paid, never) for _ in range(times - 1)]
            assert first.handling is Handling.DONE
            assert {result.handling for result in again} == {Handling.DUPLICATE}
            assert self.written(inbox) == [paid.tracking_id]

    @pytest.mark.req("CC-002")
    def test_the_row_of_a_done_event_survives_the_inbox_that_wrote_it(self) -> None:
        with self.inbox() as inbox:
            paid = event()
            inbox.process(contract(), paid, write)
            with self.another(inbox) as other:
                assert other.process(contract(), paid, never).duplicate

    @pytest.mark.req("CC-002")
    def test_what_the_handler_returned_is_in_the_result_and_a_duplicate_has_none(self) -> None:
        with self.inbox() as inbox:
            paid = event()
            assert inbox.process(contract(), paid, lambda *_: 42).value == 42
            assert inbox.process(contract(), paid, never).value is None

    @pytest.mark.req("CC-012")
    def test_of_16_copies_at_once_one_takes_effect_and_no_result_comes_before_its_commit(self) -> None:
        billing, paid = contract(), event()
        with self.inbox() as inbox:

            def deliver(_: int) -> tuple[Handling, list[str]]:
                result = inbox.process(billing, paid, write_then(lambda: time.sleep(0.2)))
                return result.handling, self.written(inbox)

            outcomes = together(16, deliver)
            results = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            assert [type(error) for error in errors] == [Busy] * len(errors)
            assert [handling for handling, _ in results].count(Handling.DONE) == 1
            assert all(seen == [paid.tracking_id] for _, seen in results), "a result before the commit"
            assert inbox.settle(billing, paid, never).duplicate

    @pytest.mark.req("CC-012")
    @pytest.mark.req("CC-051")
    def test_copies_that_come_while_it_is_in_hand_are_busy_and_never_make_it_poison(self) -> None:
        billing, paid = contract(poison_after=2), event()
        with self.inbox(billing, patience=0.02) as inbox, Held() as held:
            held.begin(inbox.process, billing, paid, write_then(held.stay)).until_inside()
            with self.another(inbox, patience=0.02) as other:
                for _ in range(5):
                    assert inbox.is_busy(billing, paid, never)
                    assert other.is_busy(billing, paid, never)
            assert held.end() == Result(Handling.DONE)
            assert inbox.process(billing, paid, never).duplicate

    @pytest.mark.req("CC-012")
    @pytest.mark.req("CC-051")
    def test_a_copy_that_comes_after_the_lease_of_one_that_still_runs_is_busy_and_not_counted(self) -> None:
        billing, paid = contract(poison_after=2), event()
        with (
            self.inbox(billing, patience=0.02) as inbox,
            self.another(inbox, patience=0.02) as other,
            Held() as held,
        ):
            held.begin(inbox.process, billing, paid, write_then(held.stay)).until_inside()
            for _ in range(5):
                self.advance(other, billing.lease + 1)
                assert other.is_busy(billing, paid, never)
            assert held.end() == Result(Handling.DONE)
            assert self.written(inbox) == [paid.tracking_id]
            assert other.process(billing, paid, never).duplicate

    @pytest.mark.req("CC-012")
    def test_when_the_winner_rolls_back_while_a_copy_waits_exactly_one_succeeds_later(self) -> None:
        billing, paid = contract(), event()
        with self.inbox() as inbox, ExitStack() as stack, Held() as held:

            def fail() -> None:
                held.stay()
                raise RuntimeError("rolled back")

            held.begin(inbox.process, billing, paid, write_then(fail)).until_inside()
            copies = [stack.enter_context(Held()).begin(inbox.settle, billing, paid, write) for _ in range(3)]
            assert isinstance(held.end(), RuntimeError)
            handlings = sorted(copy.end().handling for copy in copies)
            assert handlings == [Handling.DONE, Handling.DUPLICATE, Handling.DUPLICATE]
            assert self.written(inbox) == [paid.tracking_id]

    @pytest.mark.req("CC-010")
    def test_two_consumers_of_one_event_both_do_it(self) -> None:
        one, two = contract("billing"), contract("shipping")
        with self.inbox(one, two) as inbox:
            paid = event()
            assert inbox.process(one, paid, write).handling is Handling.DONE
            assert inbox.process(two, paid, write).handling is Handling.DONE
            assert inbox.process(one, paid, never).duplicate
            assert inbox.process(two, paid, never).duplicate
            assert self.written(inbox) == [paid.tracking_id] * 2

    @pytest.mark.req("CC-010")
    def test_the_dedup_row_names_event_and_consumer_and_when_it_was_done(self) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event("e1"), write)
            [row] = inbox.rows("SELECT tracking_id, consumer_id, processed_at FROM onceward_dedup")
            assert (row["tracking_id"], row["consumer_id"]) == ("e1", "billing")
            assert row["processed_at"] is not None

    @pytest.mark.req("CC-002")
    def test_the_same_id_with_another_payload_is_a_contract_failure_without_effect(self) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event("e1", {"amount": 1}), write)
            for _ in range(2):
                with pytest.raises(ContractError) as refused:
                    inbox.process(contract(), event("e1", {"amount": 2}), never)
                assert (refused.value.kind, refused.value.tracking_id) == (Breach.CONFLICT, "e1")
            assert self.written(inbox) == ["e1"]
            assert inbox.process(contract(), event("e1", {"amount": 1}), never).duplicate

    @pytest.mark.req("CC-002")
    def test_the_order_of_keys_in_a_payload_makes_no_other_payload(self) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event("e1", {"a": 1, "b": {"c": 2, "d": 3}}), write)
            assert inbox.process(contract(), event("e1", {"b": {"d": 3, "c": 2}, "a": 1}), never).duplicate

    @pytest.mark.req("CC-010")
    def test_a_copy_on_a_later_day_is_a_duplicate(self) -> None:
        with self.inbox() as inbox:
            paid = event(created_at=datetime(2020, 2, 28, 23, 59, 59, tzinfo=UTC))
            inbox.process(contract(), paid, write)
            for _ in range(3):
                self.advance(inbox, 86_400.0)
                assert inbox.process(contract(), paid, never).duplicate
            assert self.written(inbox) == [paid.tracking_id]

    @pytest.mark.req("CC-010")
    def test_events_on_both_sides_of_midnight_are_each_done_once(self) -> None:
        midnight = datetime(2020, 3, 1, tzinfo=UTC)
        with self.inbox() as inbox:
            both = [
                event("before", created_at=midnight - timedelta(microseconds=1)),
                event("after", created_at=midnight),
            ]
            for _ in range(2):
                for each in both:
                    inbox.process(contract(), each, write)
            assert self.written(inbox) == ["after", "before"]

    @pytest.mark.req("CC-002")
    def test_a_type_that_the_contract_does_not_name_is_refused_before_anything_is_written(self) -> None:
        with self.inbox() as inbox:
            with pytest.raises(ContractError) as refused:
                inbox.process(contract(), event(event_type="order.lost"), never)
            assert refused.value.kind is Breach.EVENT_TYPE
            assert inbox.rows("SELECT * FROM onceward_attempts") == []

    def test_a_mapping_with_the_fields_of_an_event_will_do(self) -> None:
        sent = {"tracking_id": "e1", "event_type": "order.paid", "created_at": "2020-01-01T00:00:00Z"}
        with self.inbox() as inbox:
            assert inbox.process(contract(), {**sent, "payload": {}}, write).handling is Handling.DONE
            assert inbox.process(contract(), {**sent, "payload": {}}, never).duplicate

    @pytest.mark.req("CC-012")
    def test_a_failed_event_has_no_row_that_would_make_its_copy_a_duplicate(self) -> None:
        with self.inbox() as inbox:
            paid = event()
            with pytest.raises(RuntimeError, match="not today"):
                inbox.process(contract(), paid, raising(RuntimeError("not today")))
            assert inbox.rows("SELECT * FROM onceward_dedup") == []
            assert inbox.process(contract(), paid, write).handling is Handling.DONE
