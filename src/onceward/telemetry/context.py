"""The work that the running code belongs to: for log lines, spans, and code that checks whether to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class CurrentWork(Protocol):
    """The work in flight here. The engine's work objects implement it."""

    step: str
    attempt: int

    @property
    def task(self) -> str: ...
    @property
    def transaction_id(self) -> str | None: ...


class CurrentAttempt(Protocol):
    """An attempt under a time limit."""

    expired: bool

    @property
    def limit(self) -> str:
        """The time limit that ends it: `step`, `transaction` or `loop`."""
        ...

    @property
    def hurried(self) -> bool:
        """Whether it was asked to stop because the run is ending, not because its time ran out."""
        ...


current_work: ContextVar[CurrentWork | None] = ContextVar("onceward_work", default=None)
current_attempt: ContextVar[CurrentAttempt | None] = ContextVar("onceward_attempt", default=None)
"""Set while an attempt under a time limit runs."""


def attempt_expired() -> bool:
    """Whether the attempt running here has been asked to stop."""
    attempt = current_attempt.get()
    return attempt is not None and attempt.expired


def attempt_hurried() -> bool:
    """Whether it was asked to stop because the run is ending."""
    attempt = current_attempt.get()
    return attempt is not None and attempt.expired and attempt.hurried


@contextmanager
def working_on(work: CurrentWork) -> Iterator[None]:
    """Stamp log lines in this block with this work, even if it runs elsewhere or has ended."""
    token = current_work.set(work)
    try:
        yield
    finally:
        current_work.reset(token)
