"""The boundaries of a delivery, and what may happen at one of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec


class Boundary(StrEnum):
    BEFORE_DEDUP = "before the dedup decision"
    BEFORE_HANDLER = "before the handler"
    STATEMENT_FAILS = "instead of write"
    AFTER_WRITE = "after write"
    EFFECT_FAILS = "instead of effect"
    AFTER_EFFECT = "after effect"
    BEFORE_COMMIT = "before the commit"
    AFTER_COMMIT = "after the commit, before the acknowledgement"


class Fault(msgspec.Struct, frozen=True):
    """Something that happens once, at a boundary; to writes and effects by number, from 1."""

    boundary: Boundary
    number: int = 0
    action: Literal["raise", "kill"] = "raise"

    def __str__(self) -> str:
        return f"{self.boundary} {self.number}" if self.number else str(self.boundary)


class Injected(Exception):
    """What the kit raises at a boundary. No handler expects it, and none may pass over it."""


def inner_boundaries(writes: int, effects: int, action: Literal["raise", "kill"]) -> list[Fault]:
    """Those in and around a handler that writes and has effects so often."""
    found = [Fault(Boundary.BEFORE_HANDLER, 0, action)] if action == "raise" else []
    for number in range(1, effects + 1):
        if action == "raise":
            found.append(Fault(Boundary.EFFECT_FAILS, number, action))
        found.append(Fault(Boundary.AFTER_EFFECT, number, action))
    for number in range(1, writes + 1):
        if action == "raise":
            found.append(Fault(Boundary.STATEMENT_FAILS, number, action))
        found.append(Fault(Boundary.AFTER_WRITE, number, action))
    return [*found, Fault(Boundary.BEFORE_COMMIT, 0, action), Fault(Boundary.AFTER_COMMIT, 0, action)]
