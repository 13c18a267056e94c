"""When events are grouped: by what was measured, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import pytest

from onceward.task.groups import pace as pace_module
from onceward.task.groups.pace import GroupPace
from onceward.task.groups.together import LONGEST

WORKERS, LANES, SIZE = 8, 4, 10
COMMIT = 0.010

Seconds = Callable[[int], float]
"""Of a handler, if so many run at once."""


class World:
    """Workers that always have events: each turn, as many as may do one group or one event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Seconds) -> None:
        self.now = 0.0
        self.pace = GroupPace(LANES)
        self.seconds = seconds
        self.grouped = self.events = 0
        monkeypatch.setattr(pace_module, "monotonic", lambda: self.now)

    def turn(self) -> None:
        groups = self.pace.groups
        number, events = (LANES, SIZE) if groups else (WORKERS, 1)
        seconds = self.seconds(number)
        events = min(events, ceil(LONGEST / seconds))
        handlers = events * seconds
        units = [object() for _ in range(number)]
        for each in units:
            self.pace.begin(each)
        self.now += handlers + COMMIT
        for each in units:
            self.pace.end(each, grouped=groups, events=events, handlers=handlers, whole=handlers + COMMIT)
        self.events += number * events
        self.grouped += number * events if groups else 0

    def share_of_groups(self, seconds: float) -> float:
        """How many of the events of this time were done in groups."""
        self.grouped = self.events = 0
        until = self.now + seconds
        while self.now < until:
            self.turn()
        return self.grouped / self.events


@pytest.mark.req("GC-13")
def test_quick_handlers_are_always_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(monkeypatch, lambda _: 0.004).share_of_groups(60.0) == 1.0


@pytest.mark.req("GC-13")
def test_handlers_that_are_slow_only_beside_each_other_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs 3 ms of the event loop that all share."""
    assert World(monkeypatch, lambda at_once: 0.003 * at_once).share_of_groups(60.0) > 0.95


@pytest.mark.req("GC-13")
def test_handlers_that_wait_run_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(monkeypatch, lambda _: 0.1).share_of_groups(60.0) < 0.1


@pytest.mark.req("GC-13")
def test_handlers_that_stop_waiting_are_grouped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lambda _: 0.1)
    world.share_of_groups(60.0)
    world.seconds = lambda at_once: 0.003 * at_once
    world.share_of_groups(60.0)
    assert world.share_of_groups(60.0) > 0.95
