"""Whether events wait for each other and share a commit, or run beside each other with a commit each.

Quick handlers are always grouped. Of others, the way is chosen that ends more events per second: handlers that share
an event loop or an interpreter take long beside each other, and are quick in a group; those that wait for something
else are not. Only trying tells which they are. So a worker tries the other way from time to time, for a few groups.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

QUICK: Final = 0.005
"""Seconds per handler, on average, up to which groups are always formed."""
TRIAL: Final = 16
"""Groups, or single events, of a trial."""
SELDOM: Final = 50
"""Between two trials there is this many times as long as the last one took."""


CLEARLY: Final = 1.25
"""How many times as much groups must cost before they are given up: in doubt, one commit for all is less work for the
database."""


class _Cost:
    """Seconds per event, where seconds that several spend at once are shared."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events = 0

    def add(self, seconds: float, events: int) -> None:
        self._seconds += seconds
        self._events += events

    @property
    def per_event(self) -> float:
        return self._seconds / (self._events or 1)


class GroupPace:
    """What one call of one consumer has measured."""

    def __init__(self, at_once: int) -> None:
        self._one_by_one = at_once == 1
        """Handlers wait for each other anyway."""
        self._handler = 0.0
        self._grouped = True
        self._costs = {True: _Cost(), False: _Cost()}
        """In groups, and not, since the last decision."""
        self._under_way: set[Any] = set()
        self._trial = 0
        self._began = self._next = 0.0
        """When the last trial began, and when the next is due."""

    @property
    def groups(self) -> bool:
        """Whether to form groups."""
        return self._one_by_one or self._handler <= QUICK or self._grouped

    def begin(self, group: Any) -> None:
        self._under_way.add(group)

    def give_up(self, group: Any) -> None:
        """Its time tells nothing."""
        self._under_way.discard(group)

    def end(self, group: Any, *, grouped: bool, events: int, handlers: float, whole: float) -> None:
        """Take note of a group, or of a single event: the seconds of its handlers, and of all with its commit."""
        self._costs[grouped].add(whole / (len(self._under_way) or 1), events)
        self._under_way.discard(group)
        self._handler += (handlers / events - self._handler) / 4
        if self._handler > QUICK:
            self._choose(grouped)

    def _choose(self, grouped: bool) -> None:
        now = monotonic()
        if self._trial:
            self._trial -= grouped is self._grouped
            if not self._trial:
                together, beside = self._costs[True].per_event, self._costs[False].per_event
                self._grouped = together <= CLEARLY * beside
                self._costs = {True: _Cost(), False: _Cost()}
                self._next = now + SELDOM * (now - self._began)
        elif now >= self._next:
            self._grouped = not self._grouped
            self._trial, self._began = TRIAL, now
