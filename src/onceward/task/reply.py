"""What an attempt replies when it does not return a value."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import NamedTuple


class Limit(StrEnum):
    """What ended an attempt: one of the three independent time limits, or that the run is ending."""

    STEP = "step"
    TRANSACTION = "transaction"
    LOOP = "loop"
    HURRY = "hurry"
    """`task.hurry()`: no policy's limit, and no time-out."""


ENDING = (Limit.LOOP, Limit.HURRY)
"""The call itself ends: what these cut off is abandoned, and nothing comes after it."""


class Failed:
    """The reply of an attempt that did not return: it raised `error`, or `limit` ended it.

    `exits` marks what is no failure of the work but a wish to leave: KeyboardInterrupt, SystemExit and their
    like. It is never an outcome; the engine brings it to the caller.
    """

    __slots__ = ("error", "exits", "limit", "stuck")

    def __init__(
        self,
        error: BaseException | None = None,
        limit: Limit | None = None,
        *,
        stuck: bool = False,
        exits: bool = False,
    ) -> None:
        self.error = error
        self.limit = limit
        self.stuck = stuck
        self.exits = exits


class Exited(NamedTuple):
    """The end of a script that was left by way of a KeyboardInterrupt, SystemExit or cancellation."""

    error: BaseException


def caught(error: BaseException, limit: Limit | None = None) -> Failed:
    """What user code raised, as a reply; `limit` if that was only after its time had run out.

    A `CancelledError` that arrives here came out of the user's own code, with nobody cancelling the
    engine: a failure like any other, or one poisonous message could take down every worker in turn.
    """
    if isinstance(error, (Exception, asyncio.CancelledError)):
        return Failed(error, limit)
    return Failed(error, exits=True)


def caught_in_task(error: BaseException) -> Failed:
    """`caught`, in asyncio: a cancellation that somebody asked of this task goes on to whoever asked."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise error
    return caught(error)
