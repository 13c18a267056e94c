"""Time that cannot be set. The wall clock of a machine can be wrong, and jump when it is corrected; the time since the
machine started only advances, also while the machine sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SINCE_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", None)


_ahead = 0.0
"""Seconds that a test has moved the time of this process ahead."""


def move_ahead(seconds: float) -> None:
    """Let that much time pass at once, for queues and databases in this process. Tests do it."""
    global _ahead
    _ahead += seconds


def wall() -> float:
    """Seconds since 1970, by the clock of this machine."""
    return time.time() + _ahead


def uptime() -> float:
    """Seconds since this machine started, the same in all its processes."""
    return _ahead + (time.monotonic() if _SINCE_BOOT is None else time.clock_gettime(_SINCE_BOOT))


@lru_cache(1)
def boot_id() -> str:
    """Identifies the start of this machine that `uptime` counts from; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text("utf-8").strip()
    except OSError:
        return ""


class Moment(msgspec.Struct, frozen=True):
    """A time that was known to be right."""

    at: float
    """Seconds since 1970."""
    boot: str = ""
    uptime: float = 0.0
    """Seconds since the machine had started; comparable only with those of the same `boot`."""


class WatchedClock:
    """A wall clock that is compared with `uptime`, to notice when it is set to another time."""

    def __init__(
        self,
        wall: Callable[[], float] = wall,
        uptime: Callable[[], float] = uptime,
        boot: str | None = None,
        *,
        tolerance: float,
    ) -> None:
        """Differences up to `tolerance` seconds are corrections that matter to nobody."""
        self.wall = wall
        self._uptime = uptime
        self._boot = boot_id() if boot is None else boot
        self._tolerance = tolerance
        self.trust()

    def trust(self) -> None:
        """From now on, the wall clock is right."""
        self._ahead = self.wall() - self._uptime()

    def assume(self, now: float) -> None:
        """From now on, this is the time, and the wall clock is wrong if it differs."""
        self._ahead = now - self._uptime()

    def since(self, moment: Moment) -> float | None:
        """Return the seconds that have passed since then; None if this machine has been restarted, or is another."""
        return self._uptime() - moment.uptime if moment.boot and moment.boot == self._boot else None

    def off_since(self, moment: Moment) -> float:
        """Return for how many seconds this machine was off after that moment, by the wall clock."""
        return self.wall() - (self._uptime() if self._boot else 0.0) - moment.at

    def moment(self) -> Moment:
        return Moment(self.now(), self._boot, self._uptime())

    def agrees(self, moment: Moment) -> bool:
        """Whether the wall clock shows about that time."""
        return abs(self.wall() - moment.at) <= self._tolerance

    def is_behind(self, moment: Moment) -> bool:
        return self.wall() < moment.at - self._tolerance

    def jump(self) -> float:
        """How many seconds the wall clock has jumped ahead, or back if negative. 0 if it runs as it should."""
        jump = self.wall() - self._uptime() - self._ahead
        return jump if abs(jump) > self._tolerance else 0.0

    def now(self) -> float:
        """Seconds since 1970. After a jump, as if there had been none."""
        return self.wall() - self.jump()
