"""The window beyond a cursor: what can be confirmed, what must wait, and what is given up."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from onceward import Transaction
from onceward.connectors.boundary.window import WindowQueue
from onceward.connectors.codec import encode
from onceward.connectors.lease_rules import LeaseRules
from onceward.testing.clock import FakeClock
from onceward.transaction import Settlement, Verdict
from tests.support.world import business, system


def queue(facts: int = 0, **rules: object) -> tuple[WindowQueue, FakeClock]:
    clock = FakeClock(1_000_000_000.0)
    made = WindowQueue(LeaseRules(**rules), clock)  # type: ignore[arg-type]
    made.add(bodies(range(1, facts + 1)))
    return made, clock


def bodies(offsets: Iterable[int]) -> list[tuple[int, bytes]]:
    return [(offset, encode(Transaction(payload=offset))) for offset in offsets]


def settle(made: WindowQueue, verdict: Verdict, *transactions: Transaction, **more: object) -> None:
    made.settle_transactions([Settlement(each, verdict, **more) for each in transactions])  # type: ignore[arg-type]


@given(st.permutations(range(1, 13)), st.sets(st.integers(0, 11)))
def test_what_may_be_confirmed_is_what_is_done_without_a_hole(order: list[int], reported: set[int]) -> None:
    """The cursor moves after some of the outcomes."""
    made, _ = queue(12)
    fetched = {each.payload: each for each in made.fetch_transactions(12)}
    done: set[int] = set()
    cursor = 0
    for step, offset in enumerate(order):
        settle(made, Verdict.DONE, fetched[offset])
        done.add(offset)
        prefix = next(each for each in range(14) if each + 1 not in done)
        assert made.window.finished() == (prefix if prefix > cursor else None)
        if step in reported and prefix > cursor:
            cursor = prefix
            made.window.forget_up_to(cursor)
        assert len(made.window) == 12 - cursor


def test_what_failed_or_was_given_back_or_is_dead_is_not_done() -> None:
    made, clock = queue(4)
    made.bury_failures()
    failed, returned, dead, done = made.fetch_transactions(4)
    settle(made, Verdict.FAILED, failed, error=system())
    settle(made, Verdict.RETURNED, returned)
    settle(made, Verdict.FAILED, dead, error=business())
    settle(made, Verdict.DONE, done)
    assert made.window.finished() is None
    clock.advance(2.0)
    settle(made, Verdict.DONE, *made.fetch_transactions(4))
    assert made.window.finished() == 2
    made.forget_dead([each.key for each in made.dead_letters()])
    assert made.window.finished() == 4


def test_a_page_brings_only_what_was_never_here() -> None:
    made, _ = queue(3)
    settle(made, Verdict.DONE, *made.fetch_transactions(2))
    made.window.forget_up_to(2)
    made.add(bodies(range(1, 6)))  # requested before the cursor moved
    assert [each.payload for each in made.fetch_transactions(10)] == [3, 4, 5]


def test_what_somebody_else_has_confirmed_is_not_handed_out() -> None:
    made, _ = queue(4)
    made.bury_failures()
    settle(made, Verdict.FAILED, *made.fetch_transactions(1), error=business())
    made.window.forget_up_to(3)
    assert [each.payload for each in made.fetch_transactions(10)] == [4]
    assert made.dead_letters() == []


def test_nothing_is_given_up_while_there_is_no_place_for_the_dead() -> None:
    made, clock = queue(1, max_deliveries=2)
    for _ in range(6):
        settle(made, Verdict.FAILED, *made.fetch_transactions(1), error=business())
        clock.advance(61.0)
    assert made.dead_letters() == []
    made.bury_failures()
    assert made.fetch_transactions(1) == [], "now there is room for it"
    (dead,) = made.dead_letters()
    assert (dead.key[0], dead.deliveries, len(dead.history)) == (1, 6, 6)


def test_an_obstacle_is_what_failed_and_not_what_somebody_is_at() -> None:
    made, _ = queue(2)
    first, second = made.fetch_transactions(2)
    assert made.window.obstacle() is None
    settle(made, Verdict.DONE, second)
    assert made.window.obstacle() is None
    settle(made, Verdict.FAILED, first, error=system())
    assert made.window.obstacle() == 1
