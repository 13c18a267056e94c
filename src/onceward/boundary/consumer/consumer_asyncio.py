"""The consumer of a boundary, for asyncio."""

# make faces writes consumer.py, with
#   run_blocking: self._run
#   port: _fetch, _confirm

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from onceward._process.stop import LAST_WAIT, AsyncStop
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.consumer.loop import EMPTY_WAIT, FactLoop
from onceward.boundary.model import Page, StoredFact

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession

    AsyncHandler = Callable[[StoredFact, AsyncDbSession], Awaitable[Any]]


class AsyncBoundaryConsumer(FactLoop):
    """Consumes a boundary's facts one after another, under a durable name, in asyncio."""

    def __init__(
        self,
        client: AsyncBoundaryClient,
        consumer_name: str,
        limit: int = 100,
        *,
        empty_wait: float = EMPTY_WAIT,
    ) -> None:
        super().__init__(consumer_name, limit, empty_wait, AsyncStop())
        self._client = client
        self._stop: AsyncStop

    async def run(self, handler: AsyncHandler, engine: AsyncEngine, *, drain: bool = False) -> None:
        """Fetch, apply and persist, confirm, until `stop()` or, with `drain`, until there is nothing new.

        `await handler(fact, session)` runs in one database transaction, committed before the next fact. If it or the
        commit raises, the transaction is rolled back, nothing of the batch is confirmed, nothing is retried, and the
        same exception is raised here with a note that names the fact. Errors of the boundary are raised as well. Call
        `run` again to continue.
        """
        from onceward.db import AsyncDbSession
        from onceward.db.handlers import async_attempts

        AsyncDbSession(engine)  # refuses the wrong kind of engine before anything is fetched
        error = await self._run(async_attempts(handler, engine), drain)
        if error is not None:
            raise error

    async def _fetch(self, confirm: int = 0) -> Page:
        fetch = partial(self._client.fetch, confirm=confirm)
        grace = LAST_WAIT if confirm else 0.0
        return await self._stop.leave(fetch, self.consumer_name, self.limit, grace=grace)

    async def _confirm(self, offset: int) -> None:
        await self._stop.leave(self._client.confirm, self.consumer_name, offset, grace=LAST_WAIT)
