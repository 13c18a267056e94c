"""Time as the engine sees it: the one thing, with randomness, that a test may replace."""

from __future__ import annotations

import time

LONGEST_SLEEP = 1e9
"""Seconds. Threads and timers refuse to sleep for as long as a float can say."""


class Clock:
    """The real clock. `onceward.testing.FakeClock` replaces it in tests."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    def sleeping(self, seconds: float) -> float:
        """Told before the engine sleeps out a backoff; answers how long it shall really sleep."""
        return seconds
