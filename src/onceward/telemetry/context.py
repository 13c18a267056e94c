"""The work that the running code belongs to: for log lines, spans, and code that checks whether to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Final, Protocol


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

_OF_WORK: Any = object()
_attempt: ContextVar[Any] = ContextVar("onceward_attempt", default=_OF_WORK)


class AttemptVariable:
    """A context variable whose default is the attempt at the current work, which that makes when it is asked for: most
    handlers never ask, and then nothing has to be set for them.

    An attempt at other work does not count: a message may begin in a copy of its loop's context, while that fetches.
    """

    __slots__ = ()

    def get(self) -> CurrentAttempt | None:
        found = _attempt.get()
        if found is None:
            return None
        work = current_work.get()
        if found is _OF_WORK or getattr(found, "work", work) is not work:
            return getattr(work, "token", None)
        return found  # type: ignore[no-any-return]

    def set(self, attempt: CurrentAttempt | None) -> Token[Any]:
        return _attempt.set(attempt)

    def reset(self, token: Token[Any]) -> None:
        _attempt.reset(token)

    def follow_work(self) -> None:
        """Whatever was set here: from now on, it is the attempt at the current work."""
        _attempt.set(_OF_WORK)


current_attempt: Final = AttemptVariable()
"""The attempt that runs here, if it has a time limit or can be cut off."""


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
