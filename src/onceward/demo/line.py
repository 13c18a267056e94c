"""All parts of a demo while they run, from the shop's producer to the warehouse's ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from onceward.demo import journal, ledger
from onceward.demo.books import Books
from onceward.demo.crew import Crew
from onceward.demo.screen import Progress, Screen
from onceward.demo.setup import Setup
from onceward.demo.shop import Sending
from onceward.demo.tasks import ShipOrder
from onceward.demo.zones import Wire, Zones
from onceward.transaction import Transaction


class Line(NamedTuple):
    setup: Setup
    zones: Zones
    wire: Wire
    sending: Sending
    crew: Crew
    books: Books

    def check(self) -> None:
        """Raises what has ended one of them, if anything has."""
        self.zones.check()
        self.crew.check()
        self.sending.check()


@contextmanager
def running(setup: Setup, messages: Sequence[Transaction], pause_at: int) -> Iterator[Line]:
    """Start everything. Nothing of it outlives the `with` block."""
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
                yield Line(setup, zones, wire, sending, crew, books)


# Waiting for something to be so, and showing meanwhile how far everything is.


LOOK = 0.1
"""Seconds between two looks at the books."""
GIVE_UP_AFTER = 20.0
"""Seconds without any change after which there will be none."""


class Watch:
    """Looks at the line, shows how far it is, and waits for something to be so."""

    def __init__(self, line: Line, screen: Screen) -> None:
        self.line = line
        self.screen = screen
        self.now = line.books.progress()
        self._changed_at = time.monotonic()
        self._has_given_up = False

    def look(self) -> Progress:
        self.line.check()
        try:
            progress = self.line.books.progress()
        except OSError:
            self.line.check()  # who does not answer may just have died, and has left a log
            raise
        if progress != self.now:
            self.now, self._changed_at = progress, time.monotonic()
        self.screen.show(progress)
        return progress

    def until(self, is_so: Callable[[Progress], bool], every: float = LOOK) -> bool:
        """Whether it came to be so. When nothing changes for long it will not, and nobody waits any more."""
        while not is_so(self.look()):
            self._has_given_up |= time.monotonic() - self._changed_at > GIVE_UP_AFTER
            if self._has_given_up:
                return False
            time.sleep(every)
        return True
