"""Reads the state of a demo: both boundaries, ledger, dead letters and journal."""

from __future__ import annotations

from collections import Counter
from typing import Self

from onceward.deadletters import DeadLetter, DeadLetters, Filter, Status
from onceward.demo.balance import DemoEvidence
from onceward.demo.journal import JournalReader
from onceward.demo.ledger import LedgerReader, open_engine
from onceward.demo.screen import DemoProgress
from onceward.demo.setup import CONSUMER, Setup
from onceward.demo.shop import Sending
from onceward.demo.zones import Wire, Zones


class Books:
    """The parent reads them while other processes write."""

    def __init__(self, setup: Setup, zones: Zones, wire: Wire, sending: Sending) -> None:
        self.ledger = LedgerReader(setup.ledger)
        self.journal = JournalReader(setup.journal)
        self._engine = open_engine(setup.ledger)
        self.letters = DeadLetters(self._engine)
        self._zones = zones
        self._wire = wire
        self._sending = sending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()
        self.journal.close()
        self._engine.dispose()

    def progress(self) -> DemoProgress:
        warehouse = self._zones.warehouse.stats()
        return DemoProgress(
            produced=self._sending.produced,
            duplicates=self._zones.shop.duplicates(),
            appended=self._zones.shop.stats().last,
            forwarded=warehouse.last,
            confirmed=warehouse.confirmed(CONSUMER),
            applied=self.ledger.count(),
            dead=self.ledger.letters(Status.OPEN),
            redriven=self.ledger.letters(Status.RESOLVED),
            link_is_up=self._wire.is_up,
        )

    def open_letters(self) -> list[DeadLetter]:
        return self.letters.find(Filter(status=Status.OPEN), limit=1_000_000)

    def evidence(self) -> DemoEvidence:
        return DemoEvidence(
            produced=self._sending.produced,
            duplicates=self._zones.shop.duplicates(),
            shop=self._zones.shop.ids(),
            warehouse=self._zones.warehouse.ids(),
            effects=self.ledger.effects(),
            dead={letter.message_id for letter in self.open_letters()},
            stock=self.ledger.stock(),
        )

    def letters_by_category(self) -> Counter[str]:
        return Counter(str(letter.category) for letter in self.open_letters())
