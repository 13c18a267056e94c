"""One attempt at one message: a session, the handler, the commit. What is raised comes back as the reply."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from onceward.queue.loop import Attempt
from onceward.queue.message import QueueMessage

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession, DbSession

    Handler = Callable[[QueueMessage, DbSession], None]
    AsyncHandler = Callable[[QueueMessage, AsyncDbSession], Awaitable[None]]


def attempts(handler: Handler, engine: Engine) -> Attempt:
    from onceward.db import DbSession

    async def attempt(message: QueueMessage) -> BaseException | None:
        try:
            with DbSession(engine) as session:
                result: object = handler(message, session)  # type: ignore[func-returns-value]
                if inspect.iscoroutine(result):
                    # It has not run. Committing and acknowledging would lose the message.
                    result.close()
                    raise TypeError("the handler is asynchronous; AsyncQueueConsumer runs those")
        except BaseException as error:  # noqa: BLE001
            return error
        return None

    return attempt


def async_attempts(handler: AsyncHandler, engine: AsyncEngine) -> Attempt:
    from onceward.db import AsyncDbSession

    async def attempt(message: QueueMessage) -> BaseException | None:
        try:
            async with AsyncDbSession(engine) as session:
                await handler(message, session)
        except BaseException as error:  # noqa: BLE001
            return error
        return None

    return attempt
