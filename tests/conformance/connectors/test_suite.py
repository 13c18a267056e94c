"""The conformance suite itself: it must detect what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from onceward.connectors import MemoryConnector
from onceward.testing.connectors import ConnectorConformance
from onceward.transaction import Settlement, Transaction, Verdict


class Forgets(MemoryConnector):
    """Acknowledges on fetch, as the first version of every queue does."""

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        fetched = super().fetch_transactions(batch_size, **extra)
        super().settle_transactions([Settlement(transaction, Verdict.DONE) for transaction in fetched])
        return fetched


class Reverses(MemoryConnector):
    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        super().dispatch_transactions(transactions[::-1])


class NeverExtends(MemoryConnector):
    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        pass


class HalfDispatches(MemoryConnector):
    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        for transaction in transactions:
            super().dispatch_transactions([transaction])


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Forgets, "test_what_is_not_settled_comes_back_when_its_lease_runs_out"),
        (Reverses, "test_transactions_come_in_the_order_they_were_dispatched"),
        (NeverExtends, "test_an_extended_lease_lasts_a_whole_lease_from_then"),
    ],
)
def test_a_broken_connector_fails(broken: Callable[..., Any], test: str) -> None:
    class Suite(ConnectorConformance):
        def make(self, clock: Any, **settings: Any) -> Any:
            return broken(clock=clock, **settings)

    with pytest.raises((AssertionError, ValueError)):
        getattr(Suite(), test)()


def test_a_dispatch_that_is_not_all_or_none_fails() -> None:
    class Suite(ConnectorConformance):
        def make(self, clock: Any, **settings: Any) -> Any:
            return HalfDispatches(clock=clock, **settings)

    with pytest.raises(AssertionError):
        Suite().test_one_bad_payload_keeps_the_whole_dispatch_from_happening({1})


def test_tests_for_what_a_connector_does_not_offer_are_left_out_until_a_subclass_offers_it() -> None:
    class Without(ConnectorConformance):
        pass

    class With(Without):
        def reopen(self, connector: Any, clock: Any, **settings: Any) -> Any:
            raise NotImplementedError

    assert Without.test_a_queue_outlives_its_connector is None
    assert With.test_a_queue_outlives_its_connector is not None
    assert ConnectorConformance.test_a_queue_outlives_its_connector is not None
