"""The outcome of an event that should be acknowledged."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Handling(StrEnum):
    """The outcome of an event that should be acknowledged."""

    DONE = "done"
    DUPLICATE = "duplicate"
    """It was already done; the handler was not called."""
    SUPERSEDED = "superseded"
    """A later event of its aggregate was already done (`latest-wins`); the handler was not called."""


class Result(msgspec.Struct, frozen=True):
    """The outcome of an event that should be acknowledged, and what its handler returned."""

    handling: Handling
    value: Any = None
    """What the handler returned."""

    @property
    def done(self) -> bool:
        """Whether the handler was called."""
        return self.handling is Handling.DONE

    @property
    def duplicate(self) -> bool:
        return self.handling is Handling.DUPLICATE


DONE, DUPLICATE, SUPERSEDED = Handling.DONE, Handling.DUPLICATE, Handling.SUPERSEDED
