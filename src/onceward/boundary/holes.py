"""Holes that expiry leaves in the middle of a log: runs of offsets whose facts are gone while earlier ones are kept.

A name has missed only what was removed after it was registered. So stores remember the holes, and which of them were
there before a name. A hole that nobody recorded counts as missed: a report too many is better than one too few.
"""

from __future__ import annotations

from collections.abc import Iterable

from onceward.boundary.model import Gap

Hole = tuple[int, int]
"""The first and the last missing offset."""


def holes_of(offsets: Iterable[int]) -> list[Hole]:
    """Return the runs of consecutive offsets, ascending."""
    holes: list[Hole] = []
    for offset in sorted(offsets):
        if holes and holes[-1][1] == offset - 1:
            holes[-1] = holes[-1][0], offset
        else:
            holes.append((offset, offset))
    return holes


def missed(gap: Gap, known: Iterable[Hole]) -> Gap | None:
    """Return the gap without the holes at its ends; None if nothing remains. They may overlap its ends."""
    first, last = gap.first_missing, gap.last_missing
    holes = sorted(known)
    for hole in holes:
        if hole[0] <= first <= hole[1]:
            first = hole[1] + 1
    for hole in reversed(holes):
        if hole[0] <= last <= hole[1]:
            last = hole[0] - 1
    return Gap(first, last) if first <= last else None
