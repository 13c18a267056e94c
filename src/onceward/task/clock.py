"""Time as the engine sees it: the one thing, with randomness, that a test may replace."""

from __future__ import annotations

import time


class Clock:
    """The real clock. `onceward.testing.FakeClock` replaces it in tests."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    def sleeping(self, seconds: float) -> float:
        """Told before the engine sleeps out a backoff; answers how long it shall really sleep."""
        return seconds
