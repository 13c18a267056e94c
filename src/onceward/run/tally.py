"""How the attempts of a consumer ended, how long they took, and how many it needed: numbers for `/metrics`.

They are kept in the scoreboard, so the supervisor has them without an OpenTelemetry SDK, also of workers that were
killed.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, MutableSequence, Sequence
from typing import Final, NamedTuple

from onceward.telemetry.metrics import SECONDS
from onceward.telemetry.tallies import OUTCOMES, RETRIES, Attempt

MICROSECONDS: Final = 1e6
PLACES: Final = {outcome: place for place, outcome in enumerate(OUTCOMES)}
DURATIONS: Final = len(OUTCOMES)
"""Where the buckets of durations begin, one more than there are boundaries; their sum in microseconds follows."""
ATTEMPTS: Final = DURATIONS + len(SECONDS) + 2
"""The same for retries."""
SIZE: Final = ATTEMPTS + len(RETRIES) + 2


class Histogram(NamedTuple):
    boundaries: Sequence[float]
    counts: Sequence[int]
    """Of each bucket, without those below; the last one has no upper limit."""
    sum: float

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield the upper limit of each bucket, and how many are at most that."""
        total = 0
        for limit, count in zip((*map("{:g}".format, self.boundaries), "+Inf"), self.counts, strict=True):
            total += count
            yield limit, total


class SharedTally:
    """Written by the threads of one worker."""

    def __init__(self, row: MutableSequence[int]) -> None:
        self._row = row
        self._lock = threading.Lock()

    def count(self, outcome: str, seconds: float, retries: int | None) -> None:
        """Count an attempt; `retries` if it did the work."""
        self.count_all(((outcome, seconds, retries),))

    def count_all(self, attempts: Sequence[Attempt]) -> None:
        """`count` each of these."""
        if not attempts:
            return
        with self._lock:
            row = list(self._row)
            for outcome, seconds, tries in attempts:
                row[PLACES[outcome]] += 1
                row[DURATIONS + bisect_left(SECONDS, seconds)] += 1
                row[ATTEMPTS - 1] += round(seconds * MICROSECONDS)
                if tries is not None:
                    row[ATTEMPTS + bisect_left(RETRIES, tries)] += 1
                    row[SIZE - 1] += tries
            for at, number in enumerate(row):
                self._row[at] = number

    def count_done(self, seconds: list[float]) -> None:
        """`count` attempts that did it at once, by the seconds they took."""
        seconds.sort()
        below = 0
        with self._lock:
            row = self._row
            row[PLACES["done"]] += len(seconds)
            row[ATTEMPTS] += len(seconds)
            row[ATTEMPTS - 1] += round(sum(seconds) * MICROSECONDS)
            for place, limit in enumerate(SECONDS, DURATIONS):
                if below == len(seconds):
                    return
                upto = bisect_right(seconds, limit, below)
                row[place] += upto - below
                below = upto
            row[DURATIONS + len(SECONDS)] += len(seconds) - below


def outcomes(row: Sequence[int]) -> dict[str, int]:
    return dict(zip(OUTCOMES, row[:DURATIONS], strict=True))


def durations(row: Sequence[int]) -> Histogram:
    return Histogram(SECONDS, row[DURATIONS : ATTEMPTS - 1], row[ATTEMPTS - 1] / MICROSECONDS)


def retries(row: Sequence[int]) -> Histogram:
    return Histogram(RETRIES, row[ATTEMPTS : SIZE - 1], row[SIZE - 1])


def added(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the sum of several tallies."""
    return [sum(column) for column in zip((0,) * SIZE, *rows, strict=True)]
