"""The inbox for asyncio."""

# make faces writes inbox.py, with
#   run_blocking: self._core, self._registry, self._purge, self._ports

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from onceward._sync import Raised
from onceward.inbox.contract import Contract
from onceward.inbox.event import Event
from onceward.inbox.inbox_parts import InboxParts
from onceward.inbox.metrics import instruments
from onceward.inbox.ports import AsyncInboxPorts
from onceward.inbox.processor import Result
from onceward.inbox.purge.purge import PurgeReport

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession
    from onceward.inbox.sessions.session_asyncio import AsyncInboxSession
    from onceward.transaction import Transaction

    AsyncHandler = Callable[[Event, AsyncInboxSession], Awaitable[Any]]
    Deliverable = Event | Transaction | Mapping[str, Any] | Any
    """What `Event.of` makes an event of."""


class AsyncInbox(InboxParts):
    """Effects once: the handler's writes and the record that the event is done commit together, or not at all.

    Give it to a consumer as `services={"inbox": AsyncInbox(engine)}`, or call `process` yourself. `migrate` makes the
    tables and `register` enters consumers; both may be called at every start. `clock` is for SQLite; with PostgreSQL
    the server's own time counts. With `env="production"`, or ONCEWARD_ENV in the environment, a consumer runs only if
    its code has been proven: see `onceward verify`.
    """

    def __init__(
        self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time, env: str | None = None
    ) -> None:
        self._ports = AsyncInboxPorts(engine)
        super().__init__(self._ports, clock, env)

    async def migrate(self) -> list[str]:
        """Make the tables, or bring them up to date. Returns the names of what was applied."""
        return await self._registry.migrate()

    async def register(self, contract: Contract) -> None:
        """Enter a consumer into the registry, or change its entry."""
        await self._registry.register(contract)

    async def unregister(self, consumer_id: str) -> bool:
        """Take a consumer off the registry. Its records stay."""
        return await self._registry.unregister(consumer_id)

    async def consumers(self) -> list[dict[str, Any]]:
        """The registry: consumer_id, contract, registered_at, updated_at of each."""
        return await self._registry.consumers()

    async def process(
        self,
        contract: Contract,
        event: Deliverable,
        handler: AsyncHandler,
        *,
        session: AsyncDbSession | None = None,
    ) -> Result:
        """Do an event once: `await handler(event, session)` in one transaction with the inbox's row, then commit.

        Returns when the event is to be acknowledged: done, done before, or superseded. Raises in all other cases, and
        then it must not be acknowledged: `Busy` and `Parked` (come again later), `ContractError` (never), or what
        the handler raised.

        With a `session` of yours it happens inside that session, which you commit, as in `AsyncQueueConsumer.run`.
        Starts are then not written down here; the source's own count, where the event carries it, decides about poison.
        """
        try:
            view = Event.of(event)
            call = partial(self._ports.call, handler)
            if session is None:
                await self._core.reachable(self._registry.check, contract, handler)
                return await self._core.process(contract, view, call, instruments())
            within = self._ports.join(session, view)
            await self._registry.check(contract, handler, within._apply)
            return await self._core.join(contract, view, call, within)
        except Raised as carried:
            raised = carried.unwrap()
        raise raised

    async def purge(self, consumer_id: str | None = None) -> PurgeReport:
        """Remove what is older than each consumer's retention and not on hold, in bounded steps."""
        return await self._purge.run(consumer_id)

    async def hold(self, consumer_id: str, tracking_id: str | None, *, reason: str, operator: str) -> bool:
        """Keep one event's records, or all of a consumer's, from every purge. False: they were held already."""
        return await self._purge.hold(consumer_id, tracking_id, reason, operator)

    async def release(self, consumer_id: str, tracking_id: str | None = None) -> bool:
        """End a hold. False: there was none."""
        return await self._purge.release(consumer_id, tracking_id)

    async def holds(self) -> list[dict[str, Any]]:
        """Who holds what, and why."""
        return await self._ports.transact(self._store.holds)

    async def stats(self) -> list[dict[str, Any]]:
        """For each consumer: dedup rows, unended starts, effects in doubt, parked events, horizon, holds."""
        return await self._ports.transact(self._store.stats)

    async def effects(self, *, in_doubt: bool = True, limit: int = 100) -> list[dict[str, Any]]:
        """The effect ledger; by default those begun whose outcome is unknown."""
        return await self._ports.transact(self._store.effects, in_doubt, limit)
