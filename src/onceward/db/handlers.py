"""One attempt at one message: open a session, call the handler, commit.

An attempt returns the exception instead of raising it: a handler may raise StopIteration, which a coroutine cannot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from onceward._coroutines import all_awaited, ending
from onceward._functions import awaiting, check_function, check_result, name_of
from onceward._process.forks import UserCode
from onceward.db.session import DbSession

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db.session_asyncio import AsyncDbSession

T = TypeVar("T")


def attempts(
    handler: Callable[[T, DbSession], object], engine: Engine
) -> Callable[[T], Awaitable[BaseException | None]]:
    check_function(handler, f"the handler {name_of(handler)}", asynchronous=False)

    async def attempt(message: T) -> BaseException | None:
        try:
            with DbSession(engine) as session, all_awaited(), UserCode(name_of(handler)):
                # If it has not run, committing and acknowledging would lose the message.
                check_result(handler(message, session), handler)
        except BaseException as error:  # noqa: BLE001
            return error
        return None

    return attempt


def async_attempts(
    handler: Callable[[T, AsyncDbSession], Awaitable[object]], engine: AsyncEngine
) -> Callable[[T], Awaitable[BaseException | None]]:
    from onceward.db.session_asyncio import AsyncDbSession

    check_function(handler, f"the handler {name_of(handler)}", asynchronous=True)
    call = awaiting(handler)

    async def attempt(message: T) -> BaseException | None:
        try:
            async with AsyncDbSession(engine) as session:
                with all_awaited():
                    await ending(call(message, session))
        except BaseException as error:  # noqa: BLE001
            return error
        return None

    return attempt
