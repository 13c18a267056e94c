"""The honest consumer: fetch, apply and persist each fact, confirm the batch. Nothing is retried, nothing is hidden.

    FetchFacts(consumer_name, limit)
    for each fact: handler(fact, session) in one database transaction, committed
    ConfirmReceipt(consumer_name, highest offset)          only if every fact of the batch was done

A fact that fails ends the run with its exception: what comes after it is not touched, nothing of the batch is
confirmed, and the next fetch begins with the same facts. So the handler must be idempotent; `strategies` has three
ready ways.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from onceward.boundary.client import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.model import Page, StoredFact
from onceward.now import now
from onceward.task.exceptions import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession, DbSession

    Handler = Callable[[StoredFact, DbSession], Any]
    AsyncHandler = Callable[[StoredFact, AsyncDbSession], Awaitable[Any]]

_log = logging.getLogger("onceward.boundary")

EMPTY_WAIT = 0.1
"""Seconds to wait when there is nothing new."""


class _Consumer:
    """Written for both modes: what waits is a method that blocks in one and awaits in the other."""

    def __init__(self, consumer_name: str, limit: int, empty_wait: float) -> None:
        if not consumer_name:
            raise ConfigurationError("a boundary consumer needs a durable name: its cursor goes by it")
        if limit < 1:
            raise ConfigurationError(f"limit must be 1 or more, not {limit}")
        self.consumer_name = consumer_name
        self.limit = limit
        self._empty_wait = empty_wait
        self._stopping = False

    async def _fetch(self) -> Page:
        raise NotImplementedError

    async def _confirm(self, offset: int) -> None:
        raise NotImplementedError

    async def _apply(self, fact: StoredFact) -> BaseException | None:
        """The handler and the commit. What was raised is the reply: a handler may raise StopIteration."""
        raise NotImplementedError

    async def _pause(self) -> None:
        raise NotImplementedError

    async def _run(self, drain: bool) -> BaseException | None:
        while not self._stopping:
            page = await self._fetch()
            if page.gap is not None:
                _log.error(
                    "consumer %s missed facts %d to %d: they have expired",
                    self.consumer_name,
                    page.gap.first_missing,
                    page.gap.last_missing,
                )
            if not page.facts:
                if drain:
                    return None
                await self._pause()
                continue
            for fact in page.facts:
                if self._is_stopping():
                    return None  # what was applied comes again, and is known then
                error = await self._apply(fact)
                if error is not None:
                    return self._told(error, fact)
            await self._confirm(page.facts[-1].offset)
        return None

    def _is_stopping(self) -> bool:
        return self._stopping

    def _told(self, error: BaseException, fact: StoredFact) -> BaseException:
        where = f"message_id {fact.message_id}, offset {fact.offset}, consumer {self.consumer_name}"
        _log.error(
            "a fact failed, and its batch is not confirmed: %s: %s",
            where,
            error,
            extra={"message_id": fact.message_id, "offset": fact.offset, "consumer": self.consumer_name},
        )
        error.add_note(f"while applying the fact with {where}; nothing of its batch was confirmed")
        return error


class BoundaryConsumer(_Consumer):
    """Consumes a boundary's facts under a durable name, one after another, in threads."""

    def __init__(
        self, client: BoundaryClient, consumer_name: str, limit: int = 100, *, empty_wait: float = EMPTY_WAIT
    ) -> None:
        super().__init__(consumer_name, limit, empty_wait)
        self._client = client
        self._stopped = threading.Event()

    def run(self, handler: Handler, engine: Engine, *, drain: bool = False) -> None:
        """Until `stop()`, or with `drain` until there is nothing new: fetch, apply and persist, confirm.

        `handler(fact, session)` runs in one database transaction, committed before the next fact. Whatever it or the
        commit raises is raised here, the same object with a note that names the fact.
        """
        self._handler, self._engine = handler, engine
        error = now(self._run(drain))
        if error is not None:
            raise error

    def stop(self) -> None:
        """End after the fact in hand. Safe in a signal handler and from any thread."""
        self._stopping = True
        self._stopped.set()

    async def _fetch(self) -> Page:
        return self._client.fetch(self.consumer_name, self.limit)

    async def _confirm(self, offset: int) -> None:
        self._client.confirm(self.consumer_name, offset)

    async def _apply(self, fact: StoredFact) -> BaseException | None:
        from onceward.db import DbSession

        try:
            with DbSession(self._engine) as session:
                result = self._handler(fact, session)
                if inspect.iscoroutine(result):
                    result.close()
                    raise TypeError("the handler is asynchronous; AsyncBoundaryConsumer runs those")
        except BaseException as error:  # noqa: BLE001
            return error
        return None

    async def _pause(self) -> None:
        self._stopped.wait(self._empty_wait)


class AsyncBoundaryConsumer(_Consumer):
    """`BoundaryConsumer` for asyncio: the same methods and rules; the handler is awaited."""

    def __init__(
        self,
        client: AsyncBoundaryClient,
        consumer_name: str,
        limit: int = 100,
        *,
        empty_wait: float = EMPTY_WAIT,
    ) -> None:
        super().__init__(consumer_name, limit, empty_wait)
        self._client = client

    async def run(self, handler: AsyncHandler, engine: AsyncEngine, *, drain: bool = False) -> None:
        self._handler, self._engine = handler, engine
        error = await self._run(drain)
        if error is not None:
            raise error

    def stop(self) -> None:
        self._stopping = True

    async def _fetch(self) -> Page:
        return await self._client.fetch(self.consumer_name, self.limit)

    async def _confirm(self, offset: int) -> None:
        await self._client.confirm(self.consumer_name, offset)

    async def _apply(self, fact: StoredFact) -> BaseException | None:
        from onceward.db import AsyncDbSession

        try:
            async with AsyncDbSession(self._engine) as session:
                await self._handler(fact, session)
        except BaseException as error:  # noqa: BLE001
            return error
        return None

    async def _pause(self) -> None:
        await asyncio.sleep(self._empty_wait)
