"""How one text of the engine runs in threads and in asyncio.

A *script* is a generator. It decides; it never waits. Where it needs something that waits or calls out, it
yields `(port, arguments)` and is sent the reply. `drive` performs ports by calling them, `drive_async` by
calling and, where a port hands back an awaitable, awaiting. So the semantics of the engine are written once, and
the two modes differ in their ports alone.

Because a script is suspended while a port runs, another thread or task can take it over when a port does
not come back: it sends the reply itself, and the first driver lets go when it sees `DISOWNED`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from enum import StrEnum
from types import CoroutineType, GeneratorType
from typing import Any, Final, NamedTuple, TypeVar, cast

# What an attempt replies when it does not return a value.


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


T = TypeVar("T")
Request = tuple[Callable[..., Any], tuple[Any, ...]]
Script = Generator[Request, Any, T]


class _Disowned:
    def __repr__(self) -> str:
        return "DISOWNED"


DISOWNED: Final[_Disowned] = _Disowned()
"""A port's reply when its script has been taken over meanwhile: touch nothing any more."""


def drive(script: Script[T], reply: Any = None) -> T | _Disowned:
    """Run a script to its end in this thread. `reply` is what a taken-over script is waiting for."""
    send = script.send
    try:
        while reply is not DISOWNED:
            port, arguments = send(reply)
            reply = port(*arguments)
    except StopIteration as end:
        return cast(T, end.value)
    return reply


async def drive_async(script: Script[T], reply: Any = None) -> T | _Disowned:
    """The same in the running event loop.

    A port that need not wait replies at once. A coroutine is user code, and what it raises is its reply; the
    engine's own waits are generators, and what they raise goes through.
    """
    send = script.send
    try:
        while reply is not DISOWNED:
            port, arguments = send(reply)
            reply = port(*arguments)
            if type(reply) is CoroutineType:
                try:
                    reply = await reply
                except BaseException as error:  # noqa: BLE001
                    reply = caught_in_task(error)
            elif type(reply) is GeneratorType:
                reply = await reply  # type: ignore[misc]  # made awaitable by types.coroutine
    except StopIteration as end:
        return cast(T, end.value)
    return reply
