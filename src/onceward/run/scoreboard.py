"""Counts of a worker in memory that it shares with its supervisor, so they are known even if it is killed."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import msgspec

from onceward.run import tally

COUNTS = 4
FIELDS = COUNTS + tally.SIZE
MOST_CONSUMERS = 1024
SIZE = (MOST_CONSUMERS * FIELDS + 1) * 8


class Score(msgspec.Struct, frozen=True):
    """What one consumer of one process has done."""

    succeeded: int
    failed: int
    returned: int
    in_flight: int
    """Fetched and not settled. After a crash: it is unknown whether they were applied."""
    tally: tuple[int, ...] = ()
    """See `onceward.run.tally`."""

    def after(self, earlier: Score | None) -> Score:
        """Return what both have done. What is in flight is not done."""
        if earlier is None:
            return self
        return Score(
            self.succeeded + earlier.succeeded,
            self.failed + earlier.failed,
            self.returned + earlier.returned,
            self.in_flight,
        )


class Scoreboard:
    """One row of numbers for each consumer, in the order in which the worker reports them.

    Each number is written by one process and read by the other; both see whole numbers, because they are aligned.
    """

    def __init__(self, descriptor: int) -> None:
        self._numbers = memoryview(mmap.mmap(descriptor, SIZE)).cast("q")

    @property
    def is_ended_by_operator(self) -> bool:
        """Whether somebody ends the process from outside its run."""
        return bool(self._numbers[-1])

    def note_operator(self) -> None:
        """For who ends it, before: however it ends then, its code is not to blame."""
        self._numbers[-1] = 1

    def row(self, number: int) -> memoryview:
        """For the worker to write."""
        return self._numbers[number * FIELDS : (number + 1) * FIELDS]

    def scores(self, consumers: Sequence[str]) -> dict[str, Score]:
        scores = {}
        for number, name in enumerate(consumers):
            row = tuple(self.row(number))
            succeeded, failed, returned, in_flight = row[:COUNTS]
            scores[name] = Score(succeeded, failed, returned, in_flight, row[COUNTS:])
        return scores


def new_file() -> int:
    """Return the descriptor of an empty scoreboard, which no other process sees unless it inherits it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())
