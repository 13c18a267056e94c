"""What happened in a simulation, in order. Lines are formatted only if somebody reads them."""

from __future__ import annotations

from typing import Any


class Broken(Exception):
    """An invariant does not hold. The message says which, and what happened before."""


class History:
    def __init__(self, now: Any) -> None:
        self._now = now
        self._events: list[tuple[float, str, str, tuple[Any, ...]]] = []
        self.problems: list[str] = []

    def note(self, who: object, what: str, *values: Any) -> None:
        self._events.append((self._now(), str(who), what, values))

    def accuse(self, problem: str) -> None:
        self.problems.append(problem)
        self.note("MODEL", "broken: %s", problem)

    def lines(self) -> list[str]:
        return [
            f"{at:10.3f}  {who:<12} {what % values if values else what}"
            for at, who, what, values in self._events
        ]
