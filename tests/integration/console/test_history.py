"""Counts of a consumer over its workers, which come and go."""

from __future__ import annotations

import pytest

from onceward import Onceward
from onceward.console.backstage import Backstage
from onceward.console.history import ConsumerHistory, Counted

pytestmark = pytest.mark.req("UI-06")


def test_a_worker_that_comes_or_goes_is_counted_once() -> None:
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


def test_what_earlier_processes_of_a_worker_did_counts() -> None:
    app = Onceward("shop")
    app.consumer("sqlite:///orders.db", name="charge")(lambda order: None)
    done = {"consumer": "charge", "succeeded": 3, "failed": 1}
    worker = {
        "worker": 1,
        "pid": 7,
        "consumers": [done],
        "earlier": {"charge": {"succeeded": 40, "failed": 2}},
    }
    left = {"worker": 2, "pid": None, "consumers": [], "earlier": {"charge": {"succeeded": 100, "failed": 0}}}
    stage = Backstage(app, state=lambda: {"stage": "running", "workers": [worker, left]})
    stage.start()
    stage.stop()
    assert stage.history.of("charge").total == (143, 3)
