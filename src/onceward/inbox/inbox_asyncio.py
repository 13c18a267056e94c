"""The inbox for asyncio."""

# make faces writes inbox.py, with
#   run_blocking: self.processor, self._registry, self._purge, self._ports

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from onceward._functions import check_function, name_of
from onceward._sync import Raised
from onceward.inbox.commits.attempt import EventAttempt
from onceward.inbox.contract import Contract
from onceward.inbox.event import Event
from onceward.inbox.evidence.evidence import Evidence, read_evidence, record_evidence
from onceward.inbox.inbox_parts import InboxParts
from onceward.inbox.metrics import metrics_of
from onceward.inbox.ports import AsyncInboxPorts
from onceward.inbox.purge.purge import PurgeReport
from onceward.inbox.result import Result

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db import AsyncDbSession
    from onceward.inbox.sessions.session_asyncio import AsyncInboxSession
    from onceward.transaction import Transaction

    AsyncHandler = Callable[[Event, AsyncInboxSession], Awaitable[Any]]
    Deliverable = Event | Transaction | Mapping[str, Any] | Any
    """What `Event.of` accepts."""


class AsyncInbox(InboxParts):
    """Effects once: the handler's writes and the record that the event is done commit together, or not at all.

    Pass it to a consumer as `services={"inbox": AsyncInbox(engine)}`, or call `process` yourself. `migrate` creates the
    tables and `register` adds consumers; both may be called at every start. `clock` is for SQLite; PostgreSQL uses the
    server's time. With ONCEWARD_ENV=production in the environment, or else with `env="production"`, a consumer runs
    only if it is proven: see `onceward verify`.
    """

    def __init__(
        self, engine: AsyncEngine, *, clock: Callable[[], float] | None = None, env: str | None = None
    ) -> None:
        self.engine = engine
        self._ports = AsyncInboxPorts(engine)
        super().__init__(self._ports, clock, env)

    async def migrate(self, *, back_to: int | None = None) -> list[str]:
        """Create the tables, or bring them up to date. Returns the names of the applied migrations.

        With `back_to`, revert the migrations after this number instead, before you install an older version. No record
        is lost. Stop all consumers first.
        """
        return await self._registry.migrate(back_to)

    async def check_tables(self) -> None:
        """Raise `ConfigurationError` unless the tables exist and are up to date."""
        await self._registry.check_tables()

    async def register(self, contract: Contract) -> None:
        """Add a consumer to the registry, or update its entry."""
        await self._registry.register(contract)

    async def unregister(self, consumer_id: str) -> bool:
        """Remove a consumer from the registry. Its records stay. Returns False if it was not registered."""
        return await self._registry.unregister(consumer_id)

    async def consumers(self) -> list[dict[str, Any]]:
        """Return the registry: consumer_id, contract, registered_at and updated_at of each consumer."""
        return await self._registry.consumers()

    async def record_evidence(self, evidence: Evidence) -> None:
        """Store the result of a verification, as `onceward verify --record` does."""
        await self._ports.transact(record_evidence, self._store, evidence)

    async def evidence(self, consumer_id: str) -> list[Evidence]:
        """Return the recorded verifications of a consumer, newest first."""
        return await self._ports.look(read_evidence, self._store, consumer_id)

    async def process(
        self,
        contract: Contract,
        event: Deliverable,
        handler: AsyncHandler,
        *,
        session: AsyncDbSession | None = None,
    ) -> Result:
        """Process an event once: `await handler(event, session)` in one transaction with the inbox's row, then commit.

        Returns if the event should be acknowledged: done, done before, or superseded. In all other cases it raises, and
        the event must not be acknowledged: `Busy` and `Parked` (try again later), `ContractError` (never retry), or
        whatever the handler raised.

        With your own `session`, it runs inside that session, which you commit, as in `AsyncQueueConsumer.run`. The
        inbox then records no starts; the source's delivery count, if the event has one, decides whether it is poison.
        """
        try:
            check_function(handler, f"the handler {name_of(handler)}", asynchronous=self.asynchronous)
            view = Event.of(event)
            call = partial(self._ports.call, handler)
            if session is None:
                await self.processor.reachable(self._registry.check, contract, handler)
                metrics = metrics_of(contract.consumer_id)
                return await self.processor.process(EventAttempt(contract, view, call, metrics=metrics))
            within = self._ports.join(session, view)
            await self._registry.check(contract, handler, within.apply)
            return await self.processor.join(contract, view, call, within)
        except Raised as carried:
            raised = carried.unwrap()
        raise raised

    async def purge(
        self,
        consumer_id: str | None = None,
        *,
        operator: str = "system",
        reason: str = "retention",
        progress: Callable[[PurgeReport], None] = lambda _: None,
        trust_clock: bool = False,
    ) -> PurgeReport:
        """Remove records older than their consumer's retention and not on hold, in bounded steps.

        `progress` is called after every step with the report so far. The audit records who purged, and why. Raises
        `ClockDoubtError`, and removes nothing, if the clock may be ahead, unless `trust_clock` confirms the time.
        """
        return await self._purge.run(consumer_id, operator, reason, progress, trust_clock=trust_clock)

    async def hold(self, consumer_id: str, tracking_id: str | None, *, reason: str, operator: str) -> bool:
        """Protect one event's records, or all of a consumer's, from purges. Returns False if already held.

        The audit records it, and `release`, in the same transaction.
        """
        return await self._purge.hold(consumer_id, tracking_id, reason, operator)

    async def release(
        self, consumer_id: str, tracking_id: str | None = None, *, reason: str, operator: str
    ) -> bool:
        """End a hold. Returns False if there was none."""
        return await self._purge.release(consumer_id, tracking_id, reason, operator)

    async def holds(self) -> list[dict[str, Any]]:
        """Return all holds: consumer_id, tracking_id, reason, operator and placed_at of each."""
        return await self._ports.look(self._store.holds)

    async def stats(self) -> list[dict[str, Any]]:
        """Return for each consumer: dedup rows, unended starts, effects in doubt, parked events, horizon, holds."""
        return await self._ports.look(self._store.stats)

    async def effects(self, *, in_doubt: bool = True, limit: int = 100) -> list[dict[str, Any]]:
        """Return the effect ledger; by default only effects whose outcome is unknown."""
        return await self._ports.look(self._store.effects, in_doubt, limit)

    async def key_validity(self, consumer_id: str) -> list[dict[str, Any]]:
        """Return what the recorded effects of a consumer say about their keys: for each name the shortest
        `key_valid_for` in seconds, and how many were called without one."""
        return await self._ports.look(self._store.key_validity, consumer_id)
