"""What a queue's handlers are, and one attempt of theirs at one message."""

from __future__ import annotations

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
    from onceward.db import handlers as of_one_session

    return of_one_session.attempts(handler, engine, "AsyncQueueConsumer")


def async_attempts(handler: AsyncHandler, engine: AsyncEngine) -> Attempt:
    from onceward.db import handlers as of_one_session

    return of_one_session.async_attempts(handler, engine)
