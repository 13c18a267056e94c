"""The order of an aggregate's events, whatever order they arrive in."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from onceward.inbox import Breach, Contract, ContractError, Event, Handling, Parked
from onceward.task.exceptions import Postponed
from onceward.testing.inbox.driver import InboxDriver
from onceward.testing.inbox.samples import contract, event, never, raising
from onceward.testing.inbox.suite import InboxSuite

LENGTH = 4


def numbered(aggregate_id: str, sequence: int) -> Event:
    return event(f"{aggregate_id}-{sequence}", aggregate_id=aggregate_id, sequence=sequence)


def note(event: Event, session: Any) -> None:
    """Write the event at the end of its aggregate's history."""
    session.execute(
        "INSERT INTO written (tracking_id, note, place) "
        "SELECT CAST(:id AS text), CAST(:note AS text), count(*) FROM written WHERE tracking_id = :id",
        {"id": event.aggregate_id, "note": str(event.sequence)},
    )


def deliver_all(inbox: InboxDriver, promised: Contract, events: list[Event]) -> None:
    """Deliver the events one after another, and again those that were postponed, until all are settled."""
    for _ in range(LENGTH + 1):
        events = [each for each in events if not _deliver(inbox, promised, each)]
    assert events == [], "not settled, although all events were delivered"


def _deliver(inbox: InboxDriver, promised: Contract, delivered: Event) -> bool:
    try:
        inbox.process(promised, delivered, note)
    except Postponed:
        return False
    return True


class EventOrder(InboxSuite):
    @pytest.mark.req("CC-020")
    @pytest.mark.parametrize("sequencing", ["none", "latest-wins", "strict"])
    def test_every_order_of_arrival_leads_to_the_right_end(self, sequencing: str) -> None:
        """Aggregates in interleaved pairs, in opposite orders; parked events are redelivered after the others."""
        promised = contract(sequencing=sequencing)
        orders = list(permutations(range(1, LENGTH + 1)))
        half = len(orders) // 2
        with self.inbox(promised) as inbox:
            for number in range(half):
                pair = (number, orders[number]), (-1 - number, orders[-1 - number])
                deliver_all(
                    inbox,
                    promised,
                    [
                        numbered(f"aggregate {which}", order[place])
                        for place in range(LENGTH)
                        for which, order in pair
                    ],
                )
            histories = self.histories(inbox)
            for number in range(-half, half):
                assert histories[f"aggregate {number}"] == expected(sequencing, orders[number])

    def histories(self, inbox: InboxDriver) -> dict[str, list[int]]:
        """The sequence numbers of each aggregate, in the order they took effect."""
        found: dict[str, list[int]] = {}
        for row in inbox.rows("SELECT tracking_id, note FROM written ORDER BY place"):
            found.setdefault(row["tracking_id"], []).append(int(row["note"]))
        return found

    @pytest.mark.req("CC-020")
    def test_latest_wins_skips_what_is_overtaken_and_says_so(self) -> None:
        promised = contract(sequencing="latest-wins")
        with self.inbox(promised) as inbox:
            assert inbox.process(promised, numbered("a", 2), note).handling is Handling.DONE
            assert inbox.process(promised, numbered("a", 1), never).handling is Handling.SUPERSEDED
            assert inbox.process(promised, numbered("a", 1), never).handling is Handling.DUPLICATE
            outcomes = inbox.rows("SELECT outcome FROM onceward_dedup ORDER BY tracking_id")
            assert [row["outcome"] for row in outcomes] == ["superseded", "done"]

    @pytest.mark.req("CC-020")
    def test_strict_parks_what_comes_too_early_and_does_it_once_its_turn_has_come(self) -> None:
        promised = contract(sequencing="strict", first_sequence=0)
        with self.inbox(promised) as inbox:
            for _ in range(3):
                with pytest.raises(Parked) as parked:
                    inbox.process(promised, numbered("a", 1), never)
                assert parked.value.delay > 0
            [stats] = inbox.call("stats")
            assert stats["parked"] == 1
            inbox.process(promised, numbered("a", 0), note)
            inbox.process(promised, numbered("a", 1), note)
            assert self.histories(inbox) == {"a": [0, 1]}
            [stats] = inbox.call("stats")
            assert stats["parked"] == 0

    @pytest.mark.req("CC-020")
    @pytest.mark.req("CC-051")
    def test_waiting_for_its_turn_never_makes_an_event_poison(self) -> None:
        promised = contract(sequencing="strict", poison_after=1)
        with self.inbox(promised) as inbox:
            for _ in range(5):
                with pytest.raises(Parked):
                    inbox.process(promised, numbered("a", 2), never)

    @pytest.mark.req("CC-020")
    def test_a_gap_that_nobody_fills_in_time_is_a_contract_failure(self) -> None:
        promised = contract(sequencing="strict", gap_timeout=60)
        with self.inbox(promised) as inbox:
            with pytest.raises(Parked):
                inbox.process(promised, numbered("a", 2), never)
            self.advance(inbox, 30)
            with pytest.raises(Parked):
                inbox.process(promised, numbered("a", 2), never)
            self.advance(inbox, 31)
            with pytest.raises(ContractError) as refused:
                inbox.process(promised, numbered("a", 2), never)
            assert refused.value.kind is Breach.GAP
            assert self.written(inbox) == []
            inbox.process(promised, numbered("a", 1), note)
            inbox.process(promised, numbered("a", 2), note)
            assert self.histories(inbox) == {"a": [1, 2]}, "redriven after the gap was filled"

    @pytest.mark.req("CC-020")
    @pytest.mark.parametrize("sequencing", ["latest-wins", "strict"])
    def test_a_failure_or_a_gap_in_one_aggregate_holds_no_other(self, sequencing: str) -> None:
        promised = contract(sequencing=sequencing)
        with self.inbox(promised) as inbox:
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    inbox.process(promised, numbered("a", 1), raising(RuntimeError()))
                if sequencing == "strict":
                    with pytest.raises(Parked):
                        inbox.process(promised, numbered("a", 2), never)
            for number in range(1, 4):
                assert inbox.process(promised, numbered("b", number), note).handling is Handling.DONE
            assert self.histories(inbox) == {"b": [1, 2, 3]}

    @pytest.mark.req("CC-020")
    @pytest.mark.parametrize("sequencing", ["latest-wins", "strict"])
    def test_a_failed_event_does_not_move_its_aggregate_on(self, sequencing: str) -> None:
        promised = contract(sequencing=sequencing)
        with self.inbox(promised) as inbox:
            with pytest.raises(RuntimeError):
                inbox.process(promised, numbered("a", 1), raising(RuntimeError()))
            assert inbox.process(promised, numbered("a", 1), note).handling is Handling.DONE

    @pytest.mark.req("CC-020")
    def test_consumers_and_their_sequences_do_not_touch(self) -> None:
        one, two = (contract(name, sequencing="strict") for name in ("billing", "shipping"))
        with self.inbox(one, two) as inbox:
            inbox.process(one, numbered("a", 1), note)
            with pytest.raises(Parked):
                inbox.process(two, numbered("a", 2), never)

    @pytest.mark.req("CC-020")
    def test_a_second_event_with_a_number_that_was_done_is_refused(self) -> None:
        promised = contract(sequencing="strict")
        with self.inbox(promised) as inbox:
            inbox.process(promised, numbered("a", 1), note)
            with pytest.raises(ContractError) as refused:
                inbox.process(promised, event("other", aggregate_id="a", sequence=1), never)
            assert refused.value.kind is Breach.ENVELOPE

    @pytest.mark.req("CC-020")
    @pytest.mark.parametrize("sequencing", ["latest-wins", "strict"])
    @pytest.mark.parametrize("missing", ["aggregate_id", "sequence"])
    def test_an_event_without_a_place_is_refused_where_places_matter(
        self, sequencing: str, missing: str
    ) -> None:
        promised = contract(sequencing=sequencing)
        with self.inbox(promised) as inbox:
            place: dict[str, Any] = {"aggregate_id": "a", "sequence": 1, missing: None}
            with pytest.raises(ContractError, match=missing) as refused:
                inbox.process(promised, event(**place), never)
            assert refused.value.kind is Breach.ENVELOPE


def expected(sequencing: str, order: tuple[int, ...]) -> list[int]:
    """The history of an aggregate whose events arrived in this order."""
    if sequencing == "none":
        return list(order)
    if sequencing == "strict":
        return sorted(order)
    return [number for place, number in enumerate(order) if number == max(order[: place + 1])]
