"""How long a message may keep failing before it is buried, and whether that is as long as its consumer tolerates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from onceward.durations import format_seconds
from onceward.errors import ConfigurationError

MOST_SHOWN = 20
"""Delays in a sum."""


def check_patience(
    consumer_id: str, tolerates: float, delays: Sequence[float], what: str, remedy: str
) -> None:
    """Raise `ConfigurationError` if a message with these delays is buried sooner than its consumer tolerates."""
    if sum(delays) < tolerates:
        raise ConfigurationError(
            f"consumer {consumer_id!r} tolerates failures for {format_seconds(tolerates)}, but {what} buries a failing "
            f"message after {add_up(delays)}; {remedy}, or tolerate less"
        )


def add_up(delays: Sequence[float]) -> str:
    """The arithmetic: `0.8 + 1.6 + 3 × 480 s = 24m 2s, in 6 deliveries`."""
    if not delays:
        return "0s, at its first failure"
    parts = [(len(list(same)), value) for value, same in groupby(f"{each:.3g}" for each in delays)]
    shown = [value if number == 1 else f"{number} × {value}" for number, value in parts]
    more = [] if len(shown) <= MOST_SHOWN else ["…"]
    terms = " + ".join(shown[:MOST_SHOWN] + more)
    return f"{terms} s = {format_seconds(sum(delays))}, in {len(delays) + 1} deliveries"
