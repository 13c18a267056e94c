"""Scripts: how the same code of the engine runs in threads and in asyncio.

A *script* is a generator that makes decisions and never waits. To wait or to call user code, it yields
`(port, arguments)` and is sent the reply. `drive` calls the port; `drive_async` also awaits the result if it is
awaitable. So the engine's semantics are written once, and the two modes differ only in their ports.

A script is suspended while a port runs. If a port does not return, another thread or task can take over: it sends
the reply itself, and the first driver stops when it gets `DISOWNED`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from enum import StrEnum
from types import CoroutineType, GeneratorType
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec

from onceward._functions import check_awaitable
from onceward.task.exceptions import AttemptInterrupted, postponement_of
from onceward.telemetry.redaction import scrub

T = TypeVar("T")
Request = tuple[Callable[..., Any], tuple[Any, ...]]
Script = Generator[Request, Any, T]


class TimeLimit(StrEnum):
    """What ended an attempt: one of the three independent time limits, or the end of the run."""

    STEP = "step"
    TRANSACTION = "transaction"
    LOOP = "loop"
    HURRY = "hurry"
    """`task.hurry()`, which is neither a limit of the policy nor a timeout."""


ENDING = (TimeLimit.LOOP, TimeLimit.HURRY)
"""The call itself is ending: an attempt cut off by these is abandoned, and nothing follows it."""


class Failed(msgspec.Struct, eq=False):
    """The reply of an attempt that did not return: it raised `error`, or `limit` ended it.

    `exits` marks a request to exit, not a failure: KeyboardInterrupt, SystemExit and the like. It is never an outcome;
    the engine raises it in the caller.
    """

    error: BaseException | None = None
    limit: TimeLimit | None = None
    stuck: bool = False
    exits: bool = False
    late: Any = None
    """What the attempt returned after `limit` had ended it."""


class Exited(NamedTuple):
    """The end of a script that a KeyboardInterrupt, SystemExit or cancellation ended."""

    error: BaseException


def failure_reply(error: BaseException, limit: TimeLimit | None = None) -> Failed:
    """Make a reply of an error of user code; `limit` if its time had run out before.

    A `CancelledError` here comes from user code; the engine was not cancelled. It is a failure like any other, or one
    poison message could take down every worker in turn. So is an `AttemptInterrupted` of another attempt.

    From here on the error shows no values of a database.
    """
    scrub(error)
    if isinstance(error, (Exception, asyncio.CancelledError, AttemptInterrupted)):
        return Failed(postponement_of(error) or error, limit)
    return Failed(error, exits=True)


class _Disowned:
    def __repr__(self) -> str:
        return "DISOWNED"


DISOWNED: Final[_Disowned] = _Disowned()
"""A port's reply if its script has been taken over: the driver must stop."""


def drive(script: Script[T], reply: Any = None) -> T | _Disowned:
    """Run a script in this thread. `reply` is what a taken-over script is waiting for."""
    send = script.send
    try:
        while reply is not DISOWNED:
            port, arguments = send(reply)
            reply = port(*arguments)
    except StopIteration as end:
        return cast(T, end.value)
    return reply


async def drive_async(
    script: Script[T], reply: Any, reply_to_error: Callable[[BaseException], Failed]
) -> T | _Disowned:
    """Run a script in the running event loop.

    A port that need not wait replies at once. A coroutine is user code: `reply_to_error` makes a reply of its error, or
    raises it if the call was canceled. The engine's own waits are generators: their errors propagate.
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
                    reply = reply_to_error(error)
            elif type(reply) is GeneratorType:
                reply = await reply  # type: ignore[misc]  # made awaitable by types.coroutine
    except StopIteration as end:
        return cast(T, end.value)
    return reply


_NOT_STARTED: Any = object()


class Closed(GeneratorExit):
    """The task was closed from outside. Any other GeneratorExit comes from user code."""


def await_in_context(
    run: Callable[..., Any], driven: Coroutine[Any, Any, Any], awaited: Any = _NOT_STARTED
) -> Generator[Any, Any, Any]:
    """Await a coroutine in the current task, but in another context. `awaited` is what it is waiting for."""
    try:
        if awaited is _NOT_STARTED:
            awaited = run(driven.send, None)
        while True:
            try:
                value = yield awaited
            except GeneratorExit as closing:
                run(driven.close)
                raise Closed from closing
            except BaseException as thrown:  # noqa: BLE001  pass on what the event loop throws
                awaited = run(driven.throw, thrown)
            else:
                awaited = run(driven.send, value)
    except StopIteration as end:
        return end.value


async def await_checked(given: Any, function: Callable[..., Any]) -> Any:
    """Await what `function` returned."""
    return await check_awaitable(given, function)


def release(waiter: asyncio.Future[None]) -> None:
    """Wake what waits for it, if that has not happened."""
    if not waiter.done():
        waiter.set_result(None)


class EngineTask(asyncio.Task[Any]):
    """A task of the engine: `soiled` names it once anything has canceled it."""

    def __init__(self, work: Coroutine[Any, Any, Any], soiled: set[asyncio.Task[Any]]) -> None:
        self._soiled = soiled
        super().__init__(work, name="onceward")

    def cancel(self, msg: Any | None = None) -> bool:
        self._soiled.add(self)
        return super().cancel(msg)
