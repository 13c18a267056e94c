"""Rounds of loops that may make work for each other: they are done when all have found nothing in the same round."""

from __future__ import annotations

import threading


class Rounds:
    """Each loop of a process calls `finish` when it finds nothing more, and looks again in the next round. From any
    thread."""

    def __init__(self, loops: int) -> None:
        self.are_over = False
        """Whether none did anything in the last round."""
        self._loops = loops
        self._number = 0
        self._finished = 0
        self._did_work = False
        self._lock = threading.Lock()

    def finish(self, *, did_work: bool) -> int:
        """Return the number of the round that this loop has finished."""
        with self._lock:
            number = self._number
            self._finished += 1
            self._did_work |= did_work
            if self._finished == self._loops:
                self.are_over = not self._did_work
                self._finished, self._did_work = 0, False
                self._number += 1
            return number

    def is_finished(self, number: int) -> bool:
        """Whether all loops have finished this round."""
        return self._number > number
