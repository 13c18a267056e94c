"""Which parked events their source is asked for early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from onceward._sync import run_blocking
from onceward.inbox.event import Event
from onceward.inbox.sequences import ParkedEvents
from onceward.transaction import Settlement, Transaction, Verdict

pytestmark = pytest.mark.req("WK-06")


def event(number: int, aggregate: str = "a") -> tuple[Event, Transaction]:
    metadata = {"event_type": "paid", "aggregate_id": aggregate, "sequence": number, "schema_version": 1}
    transaction = Transaction(payload={}, metadata=metadata)
    return Event.of(transaction), transaction


class Asked:
    def __init__(self) -> None:
        self.parked = ParkedEvents()
        self.parked.use(self._note)
        self.calls: list[list[Transaction]] = []

    async def _note(self, waiting: Sequence[Transaction]) -> Any:
        self.calls.append(list(waiting))
        if len(self.calls) > 5:
            raise OSError("the source is away")

    def settle(self, *settlements: Settlement) -> list[float]:
        hastened = self.parked.hastened(settlements)
        run_blocking(self.parked.call_up())
        return [each.delay for each in hastened]


def back(transaction: Transaction) -> Settlement:
    return Settlement(transaction, Verdict.RETURNED, delay=5.0)


def test_one_that_is_back_is_called_up_once_its_predecessor_is_done() -> None:
    asked = Asked()
    (second, delivered), (first, _) = event(2), event(1)
    asked.parked.park(second, delivered)
    assert asked.settle(back(delivered)) == [5.0]
    asked.parked.done(event(1, "b")[0])
    asked.settle()
    assert asked.calls == []
    asked.parked.done(first)
    asked.settle()
    asked.settle()
    assert asked.calls == [[delivered]]


def test_one_on_its_way_back_goes_without_its_delay() -> None:
    asked = Asked()
    (second, delivered), (first, other) = event(2), event(1)
    asked.parked.park(second, delivered)
    asked.parked.done(first)
    assert asked.settle(Settlement(other, Verdict.DONE)) == [0.0]  # the parked one is not settled yet
    assert asked.settle(back(delivered)) == [0.0]
    assert asked.calls == []


def test_a_copy_that_is_parked_again_takes_the_place_of_the_first() -> None:
    asked = Asked()
    (second, old), (again, new), (first, _) = event(2), event(2), event(1)
    asked.parked.park(second, old)
    asked.settle(back(old))
    asked.parked.park(again, new)
    asked.settle(back(new))
    asked.parked.done(first)
    asked.settle()
    assert asked.calls == [[new]]


def test_a_source_that_is_away_fails_nothing() -> None:
    asked = Asked()
    for number in range(2, 16, 2):
        waiting, delivered = event(number)
        asked.parked.park(waiting, delivered)
        asked.settle(back(delivered))
        asked.parked.done(event(number - 1)[0])
        asked.settle()
    assert len(asked.calls) == 7
