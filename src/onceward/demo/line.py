"""All parts of a demo while they run, from the shop's producer to the warehouse's ledger, and their observer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from onceward import Transaction
from onceward.demo import journal, ledger
from onceward.demo.books import Books
from onceward.demo.crew import Crew
from onceward.demo.screen import DemoProgress, Screen
from onceward.demo.setup import Setup
from onceward.demo.shop import Sending
from onceward.demo.tasks import ShipOrder
from onceward.demo.zones import Wire, Zones

CHECK_EVERY = 0.1
"""Seconds between two reads of the books."""
GIVE_UP_AFTER = 20.0
"""Seconds without any change after which the observer stops waiting."""


class Pipeline(NamedTuple):
    setup: Setup
    zones: Zones
    wire: Wire
    sending: Sending
    crew: Crew
    books: Books

    def check(self) -> None:
        """Raise the error that ended one of the parts, if any."""
        self.zones.check()
        self.crew.check()
        self.sending.check()


@contextmanager
def running(setup: Setup, messages: Sequence[Transaction], pause_at: int) -> Iterator[Pipeline]:
    """Start everything. All of it ends with the `with` block."""
    journal.create(setup.journal, journal.SCHEMA)
    ledger.create(setup.ledger, ShipOrder.contract)
    with Wire() as wire, Zones(setup, wire.url) as zones:
        wire.lead_to(zones.shop.url)
        with Crew(setup, zones.warehouse.url) as crew:
            crew.start()
            with (
                Sending(setup, messages, zones.shop.url, pause_at) as sending,
                Books(setup, zones, wire, sending) as books,
            ):
                yield Pipeline(setup, zones, wire, sending, crew, books)


class Observer:
    """Reads and shows the progress, and waits for conditions."""

    def __init__(self, line: Pipeline, screen: Screen) -> None:
        self.line = line
        self.screen = screen
        self.now = line.books.progress()
        self._changed_at = time.monotonic()
        self._has_given_up = False

    def refresh(self) -> DemoProgress:
        self.line.check()
        try:
            progress = self.line.books.progress()
        except OSError:
            self.line.check()  # a process that does not answer may have died, and left a log
            raise
        if progress != self.now:
            self.now, self._changed_at = progress, time.monotonic()
        self.screen.show(progress)
        return progress

    def until(self, condition: Callable[[DemoProgress], bool], every: float = CHECK_EVERY) -> bool:
        """Wait for the condition. Returns False if nothing has changed for `GIVE_UP_AFTER`, now or before."""
        while not condition(self.refresh()):
            self._has_given_up |= time.monotonic() - self._changed_at > GIVE_UP_AFTER
            if self._has_given_up:
                return False
            time.sleep(every)
        return True
