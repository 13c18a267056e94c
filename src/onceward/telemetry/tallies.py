"""Counts of attempts without OpenTelemetry, as a run keeps them for its `/metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

OUTCOMES: Final = ("done", "duplicate", "superseded", "busy", "parked", "postponed", "failed", "contract")
"""How an attempt can end."""
RETRIES: Final = (0, 1, 2, 3, 5, 10, 20, 50)
"""Bucket boundaries for counts of attempts."""


Attempt = tuple[str, float, int | None]
"""An attempt that has ended: see `AttemptTally.count`."""


class AttemptTally(Protocol):
    """Counts the attempts of one consumer."""

    def count(self, outcome: str, seconds: float, retries: int | None) -> None:
        """Count an attempt; `retries` are those before the one that did it, None for all others."""
        ...

    def count_all(self, attempts: Sequence[Attempt]) -> None:
        """`count` each of these."""
        ...

    def count_done(self, seconds: list[float]) -> None:
        """`count` attempts that did it at once, by the seconds they took."""
        ...


_tallies: dict[str, AttemptTally] = {}


def tally_with(consumer_id: str, tally: AttemptTally) -> None:
    """Count the attempts of this consumer in this process with it."""
    _tallies[consumer_id] = tally


def tally_of(consumer_id: str) -> AttemptTally | None:
    return _tallies.get(consumer_id)
