"""All parts of a demo while they run, from the shop's producer to the warehouse's ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from onceward.cli.demo import files, journal, ledger
from onceward.cli.demo.books import Books
from onceward.cli.demo.crew import Crew
from onceward.cli.demo.sending import Sending
from onceward.cli.demo.setup import Setup
from onceward.cli.demo.tasks import ShipOrder
from onceward.cli.demo.wire import Wire
from onceward.cli.demo.zones import Zones
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
    files.create(setup.journal, journal.SCHEMA)
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
