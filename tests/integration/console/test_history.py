"""Counts of a consumer over its processes, some of which are replaced."""

from __future__ import annotations

import pytest

from onceward.console.history import ConsumerHistory, Counted

pytestmark = pytest.mark.req("UI-06")


def test_a_replaced_process_is_counted_once() -> None:
    history = ConsumerHistory()
    history.add({"a": Counted(100, 5), "b": Counted(50, 0)}, 0.0)
    assert history.total == (150, 5)
    assert list(history.minutes) == [(0, 0)], "what was done before is not of this minute"
    history.add({"a": Counted(110, 5), "b": Counted(50, 0)}, 10.0)
    history.add({"a": Counted(110, 5), "c": Counted(7, 1)}, 20.0)  # instead of b
    assert history.total == (167, 6)
    assert list(history.minutes) == [(17, 1)]
    assert history.rate == pytest.approx(18 / 20)


def test_a_count_that_is_lower_than_before_began_from_zero() -> None:
    history = ConsumerHistory()
    history.add({"a": Counted(100, 0)}, 0.0)
    history.add({"a": Counted(3, 0)}, 60.0)
    assert history.total == (103, 0)
    assert list(history.minutes) == [(0, 0), (3, 0)]
