"""What the code that runs now belongs to: for log lines, spans, and code that asks whether to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class WorkInHand(Protocol):
    """The facts of the work in hand. The engine's own work objects have them."""

    step: str
    attempt: int

    @property
    def task(self) -> str: ...
    @property
    def transaction_id(self) -> str | None: ...


class AttemptInHand(Protocol):
    """An attempt under a time limit."""

    expired: bool

    @property
    def hurried(self) -> bool:
        """Whether it was asked to stop because the run is ending, and not because its time had run out."""
        ...


current_work: ContextVar[WorkInHand | None] = ContextVar("onceward_work", default=None)
current_attempt: ContextVar[AttemptInHand | None] = ContextVar("onceward_attempt", default=None)
"""Set while an attempt under a time limit runs."""


def attempt_expired() -> bool:
    """Whether the attempt that runs here has been asked to stop."""
    attempt = current_attempt.get()
    return attempt is not None and attempt.expired


def attempt_hurried() -> bool:
    """Whether that was because the run is ending, and no time had run out."""
    attempt = current_attempt.get()
    return attempt is not None and attempt.expired and attempt.hurried


@contextmanager
def working_on(work: WorkInHand) -> Iterator[None]:
    """Log lines in here belong to this work, although it runs elsewhere, or no more."""
    token = current_work.set(work)
    try:
        yield
    finally:
        current_work.reset(token)
