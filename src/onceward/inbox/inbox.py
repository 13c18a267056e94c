"""The inbox's faces: `Inbox` for threads, `AsyncInbox` for asyncio."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from onceward._sync import Raised, as_function, run_blocking
from onceward.inbox.contract import Contract
from onceward.inbox.event import Event
from onceward.inbox.metrics import instruments
from onceward.inbox.middleware import InboxMiddleware
from onceward.inbox.ports import AsyncInboxPorts, BlockingInboxPorts, InboxPorts
from onceward.inbox.processor import EventProcessor, Result
from onceward.inbox.purge.purge import Purge, PurgeReport
from onceward.inbox.registry import Registry
from onceward.inbox.sessions import joined, joined_async
from onceward.inbox.stores import store_of
from onceward.storage import migrations

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession, DbSession
    from onceward.inbox.sessions import InboxSession
    from onceward.inbox.sessions_asyncio import AsyncInboxSession
    from onceward.transaction import Transaction

    Handler = Callable[[Event, InboxSession], Any]
    AsyncHandler = Callable[[Event, AsyncInboxSession], Awaitable[Any]]
    Deliverable = Event | Transaction | Mapping[str, Any] | Any
    """What `Event.of` makes an event of."""


class _Inbox:
    """What both have."""

    asynchronous: bool

    def __init__(self, ports: InboxPorts, clock: Callable[[], float], env: str | None) -> None:
        self._store = store_of(ports.dialect, clock)
        self._core = EventProcessor(self._store, ports)
        self._ports = ports
        self._registry = Registry(self._store, ports, env)
        self._purge = Purge(self._store, ports, self._registry)

    def middleware(self) -> InboxMiddleware:
        """What the engine puts around a task with a contract."""
        return InboxMiddleware(self._core, self._registry)

    def migrations_sql(self) -> str:
        """The migrations of this database, as SQL to read or to run by hand."""
        return migrations.as_script(self._store.name)


class Inbox(_Inbox):
    """Effects once: the handler's writes and the record that the event is done commit together, or not at all.

    Give it to a consumer as `services={"inbox": Inbox(engine)}`, or call `process` yourself. The tables are made by
    `migrate`, consumers are entered by `register`; both may be called at every start. `clock` is for SQLite; with
    PostgreSQL the server's own time counts. With `env="production"`, or ONCEWARD_ENV in the environment, a
    consumer runs only if its code has been proven: see `onceward verify`.
    """

    asynchronous = False

    def __init__(
        self, engine: Engine, *, clock: Callable[[], float] = time.time, env: str | None = None
    ) -> None:
        super().__init__(BlockingInboxPorts(engine), clock, env)

    def migrate(self) -> list[str]:
        """Make the tables, or bring them up to date. Returns the names of what was applied."""
        return run_blocking(self._registry.migrate())

    def register(self, contract: Contract) -> None:
        """Enter a consumer into the registry, or change its entry."""
        run_blocking(self._registry.register(contract))

    def unregister(self, consumer_id: str) -> bool:
        """Take a consumer off the registry. Its records stay."""
        return run_blocking(self._registry.unregister(consumer_id))

    def consumers(self) -> list[dict[str, Any]]:
        """The registry: consumer_id, contract, registered_at, updated_at of each."""
        return run_blocking(self._registry.consumers())

    def process(
        self,
        contract: Contract,
        event: Deliverable,
        handler: Handler,
        *,
        session: DbSession | None = None,
    ) -> Result:
        """Do an event once: `handler(event, session)` in one transaction with the inbox's row, then commit.

        Returns when the event is to be acknowledged: done, done before, or superseded. Raises in all other cases, and
        then it must not be acknowledged: `Busy` and `Parked` (come again later), `ContractError` (never), or what
        the handler raised.

        With a `session` of yours it happens inside that session, which you commit, as in `QueueConsumer.run`. Starts
        are then not written down here; the source's own count, where the event carries it, decides about poison.
        """
        return as_function(self._process)(contract, Event.of(event), handler, session)

    async def _process(
        self, contract: Contract, event: Event, handler: Handler, session: DbSession | None
    ) -> Result:
        if session is None:
            await self._core.reachable(self._registry.check, contract, handler)
            return await self._core.process(
                contract, event, partial(self._ports.call, handler), instruments()
            )
        within = joined(session, event)
        await self._registry.check(contract, handler, within._apply)
        return await self._core.join(contract, event, partial(self._ports.call, handler), within)

    def purge(self, consumer_id: str | None = None) -> PurgeReport:
        """Remove what is older than each consumer's retention and not on hold, in bounded steps."""
        return run_blocking(self._purge.run(consumer_id))

    def hold(self, consumer_id: str, tracking_id: str | None, *, reason: str, operator: str) -> bool:
        """Keep one event's records, or all of a consumer's, from every purge. False: they were held already."""
        return run_blocking(self._purge.hold(consumer_id, tracking_id, reason, operator))

    def release(self, consumer_id: str, tracking_id: str | None = None) -> bool:
        """End a hold. False: there was none."""
        return run_blocking(self._purge.release(consumer_id, tracking_id))

    def holds(self) -> list[dict[str, Any]]:
        return run_blocking(self._ports.transact(self._store.holds))

    def stats(self) -> list[dict[str, Any]]:
        """For each consumer: dedup rows, unended starts, effects in doubt, parked events, horizon, holds."""
        return run_blocking(self._ports.transact(self._store.stats))

    def effects(self, *, in_doubt: bool = True, limit: int = 100) -> list[dict[str, Any]]:
        """The effect ledger; by default those begun whose outcome nobody knows."""
        return run_blocking(self._ports.transact(self._store.effects, in_doubt, limit))


class AsyncInbox(_Inbox):
    """`Inbox` for asyncio: the same methods and rules, awaited."""

    asynchronous = True

    def __init__(
        self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time, env: str | None = None
    ) -> None:
        super().__init__(AsyncInboxPorts(engine), clock, env)

    async def migrate(self) -> list[str]:
        return await self._registry.migrate()

    async def register(self, contract: Contract) -> None:
        await self._registry.register(contract)

    async def unregister(self, consumer_id: str) -> bool:
        return await self._registry.unregister(consumer_id)

    async def consumers(self) -> list[dict[str, Any]]:
        return await self._registry.consumers()

    async def process(
        self,
        contract: Contract,
        event: Deliverable,
        handler: AsyncHandler,
        *,
        session: AsyncDbSession | None = None,
    ) -> Result:
        """As `Inbox.process`; the handler is awaited."""
        try:
            view = Event.of(event)
            if session is None:
                await self._core.reachable(self._registry.check, contract, handler)
                return await self._core.process(
                    contract, view, partial(self._ports.call, handler), instruments()
                )
            within = joined_async(session, view)
            await self._registry.check(contract, handler, within._apply)
            return await self._core.join(contract, view, partial(self._ports.call, handler), within)
        except Raised as carried:
            raised = carried.raised
        raise raised

    async def purge(self, consumer_id: str | None = None) -> PurgeReport:
        return await self._purge.run(consumer_id)

    async def hold(self, consumer_id: str, tracking_id: str | None, *, reason: str, operator: str) -> bool:
        return await self._purge.hold(consumer_id, tracking_id, reason, operator)

    async def release(self, consumer_id: str, tracking_id: str | None = None) -> bool:
        return await self._purge.release(consumer_id, tracking_id)

    async def holds(self) -> list[dict[str, Any]]:
        return await self._ports.transact(self._store.holds)

    async def stats(self) -> list[dict[str, Any]]:
        return await self._ports.transact(self._store.stats)

    async def effects(self, *, in_doubt: bool = True, limit: int = 100) -> list[dict[str, Any]]:
        return await self._ports.transact(self._store.effects, in_doubt, limit)
