"""What each consumer has done in a whole run, for its last line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from onceward.app.app import RELAY
from onceward.run import tally
from onceward.run.scoreboard import Score

CUT_OFF = "cut off when a worker ended, which are delivered again"
"""Deliveries, not messages: a message that succeeds after that is counted there, too."""


class Totals:
    """The sum over all workers that have ended, however they ended."""

    def __init__(self) -> None:
        self._of: dict[str, Counter[str]] = {}
        self.tallies: dict[str, list[int]] = {}
        """How their attempts ended, by consumer."""

    def add(self, scores: Mapping[str, Score]) -> None:
        for name, each in scores.items():
            self.tallies[name] = tally.added([self.tallies.get(name, ()) or (0,) * tally.SIZE, each.tally])
            self._of.setdefault(name, Counter()).update(
                {
                    "succeeded": each.succeeded,
                    "failed": each.failed,
                    "given back": each.returned,
                    CUT_OFF: each.in_flight,
                }
            )

    @property
    def failed(self) -> int:
        return sum(counts["failed"] for counts in self._of.values())

    def __str__(self) -> str:
        # Most apps send nothing: a relay that had nothing to do is not worth a word.
        said = {name: counts for name, counts in self._of.items() if name != RELAY or counts.total()}
        return "; ".join(f"{name}: {_format(counts)}" for name, counts in said.items()) or "nothing done"


def _format(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count or what == "succeeded")
