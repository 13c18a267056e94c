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
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from onceward._sync import run_blocking
from onceward.boundary.client.client import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import Page, StoredFact
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession, DbSession

    Handler = Callable[[StoredFact, DbSession], Any]
    AsyncHandler = Callable[[StoredFact, AsyncDbSession], Awaitable[Any]]

_log = logging.getLogger("onceward.boundary")

EMPTY_WAIT = 0.1
"""Seconds to wait when there is nothing new."""
LONGEST_NAP = 0.1
"""Seconds: a longer wait is taken in naps, so that it ends soon after `stop()`, which then need not wake anybody."""

Attempt = Callable[[StoredFact], Awaitable[BaseException | None]]
"""One session, the handler, the commit. What was raised is the reply."""


class _Consumer:
    """Written for both modes: what waits is a method that blocks in one and awaits in the other."""

    def __init__(self, consumer_name: str, limit: int, empty_wait: float) -> None:
        if not consumer_name:
            raise ConfigurationError("a boundary consumer needs a durable name: its cursor goes by it")
        if limit < 1:
            raise ConfigurationError(f"limit must be 1 or more, not {limit}")
        if not empty_wait > 0:
            raise ConfigurationError(f"empty_wait must be more than 0 seconds, not {empty_wait}")
        self.consumer_name = consumer_name
        self.limit = limit
        self._empty_wait = empty_wait
        self._stop_requested = False

    def stop(self) -> None:
        """End after the fact in hand, for good. Safe in a signal handler and from any thread.

        In the midst of a batch nothing of it is confirmed: what was applied comes again, and is known then.
        """
        self._stop_requested = True

    async def _fetch(self) -> Page:
        raise NotImplementedError

    async def _confirm(self, offset: int) -> None:
        raise NotImplementedError

    async def _nap(self, seconds: float) -> None:
        raise NotImplementedError

    async def _run(self, attempt: Attempt, drain: bool) -> BaseException | None:
        while not self._is_stopped():
            page = await self._fetch()
            self._tell_gap(page)
            if page.facts:
                for fact in page.facts:
                    if self._is_stopped():
                        return None
                    error = await attempt(fact)
                    if error is not None:
                        return self._told(error, fact)
                await self._confirm_batch(page)
            elif drain:
                return None
            else:
                await self._wait()
        return None

    def _is_stopped(self) -> bool:
        return self._stop_requested

    async def _confirm_batch(self, page: Page) -> None:
        offset = page.facts[-1].offset
        try:
            await self._confirm(offset)
        except BoundaryError as error:
            error.add_note(
                f"while confirming offset {offset} of consumer {self.consumer_name}; everything up to it is applied, "
                "and comes again if the boundary has not got this"
            )
            raise

    async def _wait(self) -> None:
        left = self._empty_wait
        while left > 0 and not self._is_stopped():
            await self._nap(min(left, LONGEST_NAP))
            left -= LONGEST_NAP

    def _tell_gap(self, page: Page) -> None:
        if page.gap is not None:
            _log.error(
                "consumer %s missed facts %d to %d: they have expired",
                self.consumer_name,
                page.gap.first_missing,
                page.gap.last_missing,
                extra={"consumer": self.consumer_name, "offset": page.gap.first_missing},
            )

    def _told(self, error: BaseException, fact: StoredFact) -> BaseException:
        where = f"message_id {fact.message_id}, offset {fact.offset}, consumer {self.consumer_name}"
        error.add_note(f"while applying the fact with {where}; nothing of its batch was confirmed")
        if isinstance(error, Exception):  # an interrupt is no failure of the fact's
            _log.error(
                "a fact failed, and its batch is not confirmed: %s: %s: %s",
                where,
                type(error).__name__,
                error,
                extra={"message_id": fact.message_id, "offset": fact.offset, "consumer": self.consumer_name},
            )
        return error


class BoundaryConsumer(_Consumer):
    """Consumes a boundary's facts under a durable name, one after another, in threads."""

    def __init__(
        self, client: BoundaryClient, consumer_name: str, limit: int = 100, *, empty_wait: float = EMPTY_WAIT
    ) -> None:
        super().__init__(consumer_name, limit, empty_wait)
        self._client = client

    def run(self, handler: Handler, engine: Engine, *, drain: bool = False) -> None:
        """Until `stop()`, or with `drain` until there is nothing new: fetch, apply and persist, confirm.

        `handler(fact, session)` runs in one database transaction, committed before the next fact. Whatever it or the
        commit raises is raised here, the same object with a note that names the fact: rolled back, nothing of the batch
        confirmed, not tried again. What a call of the boundary raises is raised as well. Call `run` again to go on.
        """
        error = run_blocking(self._run(_attempts(handler, engine), drain))
        if error is not None:
            raise error

    async def _fetch(self) -> Page:
        return self._client.fetch(self.consumer_name, self.limit)

    async def _confirm(self, offset: int) -> None:
        self._client.confirm(self.consumer_name, offset)

    async def _nap(self, seconds: float) -> None:
        time.sleep(seconds)


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
        error = await self._run(_async_attempts(handler, engine), drain)
        if error is not None:
            raise error

    async def _fetch(self) -> Page:
        return await self._client.fetch(self.consumer_name, self.limit)

    async def _confirm(self, offset: int) -> None:
        await self._client.confirm(self.consumer_name, offset)

    async def _nap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _attempts(handler: Handler, engine: Engine) -> Attempt:
    from onceward.db import DbSession
    from onceward.db.handlers import attempts

    DbSession(engine)  # refuses an engine of the wrong kind before anything is fetched
    return attempts(handler, engine)


def _async_attempts(handler: AsyncHandler, engine: AsyncEngine) -> Attempt:
    from onceward.db import AsyncDbSession
    from onceward.db.handlers import async_attempts

    AsyncDbSession(engine)
    return async_attempts(handler, engine)
