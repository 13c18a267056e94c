"""How long to wait before trying again. Every delay of this package is one of these."""

from __future__ import annotations

import random
from math import inf

import msgspec

LONGEST_SLEEP = 1e9
"""Seconds. Threads and timers refuse to sleep for as long as a float can say."""


class Backoff(msgspec.Struct, frozen=True):
    """`first * factor ** attempt` seconds, at most `cap`, less a random part of it."""

    first: float
    factor: float = 2.0
    cap: float = 0.0
    """0 for none."""
    jitter: float = 0.0
    """How much of a delay is random: 0 for none of it, 1 for anything between nothing and the whole delay."""

    def delay(self, attempt: int = 0) -> float:
        """Seconds to wait after failed attempt number `attempt`, counted from 0.

        Never overflows, and is never longer than a thread can sleep, which is some decades.
        """
        try:
            delay = self.first * self.factor**attempt if self.first else 0.0
        except OverflowError:
            delay = inf
        delay = min(delay, self.cap if self.cap > 0 else LONGEST_SLEEP, LONGEST_SLEEP)
        return delay * random.uniform(1 - self.jitter, 1) if self.jitter else delay
