"""How one text of the engine runs in threads and in asyncio.

A *script* is a generator. It decides; it never waits. Where it needs something that waits or calls out, it
yields `(port, arguments)` and is sent the reply. `drive` performs ports by calling them, `drive_async` by
calling and, where a port hands back an awaitable, awaiting. So the semantics of the engine are written once, and
the two modes differ in their ports alone.

Because a script is suspended while a port runs, another thread or task can take it over when a port does
not come back: it sends the reply itself, and the first driver lets go when it sees `DISOWNED`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import CoroutineType, GeneratorType
from typing import Any, Final, TypeVar, cast

from onceward.task.reply import caught_in_task

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
