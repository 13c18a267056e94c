"""How long to wait before the next attempt. Every retry delay of this package is a `Backoff`."""

from __future__ import annotations

import random
from math import inf

import msgspec

LONGEST_SLEEP = 1e9
"""Seconds. Threads and timers reject much longer sleeps."""


class Backoff(msgspec.Struct, frozen=True):
    """`first * factor ** attempt` seconds, at most `cap`, minus a random part."""

    first: float
    factor: float = 2.0
    cap: float = 0.0
    """Seconds; 0 is no cap."""
    jitter: float = 0.0
    """The random share of a delay: 0 is none; with 1 it is anything from 0 to the whole delay."""

    def delay(self, attempt: int = 0) -> float:
        """Seconds to wait after failed attempt number `attempt`, counted from 0.

        Never overflows, and never exceeds `LONGEST_SLEEP`, about 30 years.
        """
        try:
            delay = self.first * self.factor**attempt if self.first else 0.0
        except OverflowError:
            delay = inf
        delay = min(delay, self.cap if self.cap > 0 else LONGEST_SLEEP, LONGEST_SLEEP)
        return delay * random.uniform(1 - self.jitter, 1) if self.jitter else delay
