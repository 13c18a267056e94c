"""Best of several runs, bare and ours in turn, so both see the same machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 5


@dataclass(frozen=True)
class Line:
    """One comparison. `bare` and `ours` are microseconds per transaction unless `unit` says otherwise."""

    what: str
    bare: float
    ours: float
    target: str
    met: bool
    shown: str
    """The figure that the target limits: a ratio or a difference."""
    unit: str = "µs"


def compare(
    count: int,
    bare: Callable[[], object],
    ours: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
    rounds: int = ROUNDS,
) -> tuple[float, float]:
    """Microseconds per transaction of each, best of `rounds`; `prepare` runs before each and is not measured."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for index, run in enumerate((bare, ours)):
            prepare()
            gc.collect()
            began = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - began)
    return best[0] / count * 1e6, best[1] / count * 1e6


def ratio(what: str, measured: tuple[float, float], at_most: float) -> Line:
    bare, ours = measured
    return Line(what, bare, ours, f"≤ {at_most:g} ×", ours <= bare * at_most, f"{ours / bare:.2f} ×")


def added(what: str, measured: tuple[float, float], at_most: float) -> Line:
    bare, ours = measured
    return Line(what, bare, ours, f"≤ {at_most:g} µs", ours - bare <= at_most, f"+{ours - bare:.1f} µs")
