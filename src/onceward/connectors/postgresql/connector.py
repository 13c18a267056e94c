"""The connector for threads, and the one for asyncio, which makes the same calls on threads of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Unpack

from sqlalchemy.engine import URL

from onceward._process.stop import BlockingStop, engine_stop, pause
from onceward._sync import run_blocking
from onceward.connectors.background import BackgroundConnector
from onceward.connectors.lease_rules import LeaseRules, LeaseSettings
from onceward.connectors.leases import BUSY_LOOK, WRITE_WAIT, LeasingConnector
from onceward.connectors.owners import tokens_of
from onceward.connectors.postgresql.address import database_of
from onceward.connectors.postgresql.store import PostgreSqlLeaseStore
from onceward.connectors.postgresql.wait import NotifiedLine
from onceward.db.transaction import DbTransaction
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class PostgreSqlConnector(LeasingConnector):
    """A `Connector` over a queue in a PostgreSQL database, for any number of processes and machines.

    Creates its tables at its first use. `LeaseRules` explains `lease`, `max_deliveries`, `redelivery_delay` and
    `on_failure`; use the same values in every process of a queue. Leases and delays are measured by the clock of the
    server. Each connector has up to five connections: two that it keeps, two for when there is much to do, and one
    that waits for messages.

    An engine that fetches from an empty queue with nothing in flight waits up to a second for the next message.
    """

    def __init__(self, url: str | URL, queue: str, **settings: Unpack[LeaseSettings]) -> None:
        self._rows = PostgreSqlLeaseStore(database_of(url), queue)
        super().__init__(self._rows, LeaseRules(**settings))
        self._line = NotifiedLine(self._rows.engine, queue)

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take at most `batch_size` transactions; a suspect (`LeaseRules.suspect_after`) is delivered alone."""
        self._rows.fold_if_long()
        taken = super().fetch_transactions(batch_size, **extra)
        stop = engine_stop()
        if taken or stop is None or stop.requested or self.is_working():
            return taken
        if isinstance(stop, BlockingStop):
            with stop.calling(self.end_wait):
                return () if stop.requested else self._wait_for_messages(batch_size)
        return self._wait_for_messages(batch_size)

    def is_working(self) -> bool:
        """Whether a delivery of this connector is not settled: its outcome must not wait."""
        return any(not each.settled for each in list(self._deliveries.values()))

    def _wait_for_messages(self, batch_size: int) -> Sequence[Transaction]:
        with self._rows.transaction(WRITE_WAIT):
            next_due = self._rows.next_due()
        with closing(self._line.moments(next_due)) as moments:
            for _ in moments:
                taken = super().fetch_transactions(batch_size)
                if taken:
                    return taken
        return ()

    def await_transactions(self, seconds: float, /) -> bool:
        """See `onceward.connectors.base`. A fetch waits itself, unless outcomes are still to come."""
        if self.is_working():
            run_blocking(pause(min(seconds, BUSY_LOOK)))
        return True

    def end_wait(self) -> None:
        """End the fetch that waits for messages, if there is one. Safe in signal handlers and from other threads."""
        self._line.end()

    def joins(self, transaction: DbTransaction) -> bool:
        """Whether its queue is in the database of this transaction: see `onceward.inbox.sessions.acknowledgment`."""
        return self._rows.joins(transaction.connection)

    def settle_in(self, transaction: DbTransaction, delivered: Transaction, /) -> bool:
        """Remove a delivery as done, inside this transaction. Return False if its lease was lost."""
        if not self.holds(delivered):
            return False
        return self._rows.remove_in(transaction.connection, self._deliveries.of(delivered).held, delivered)

    def release_owner(self, owner: str) -> int:
        """End the leases of a dead owner now; they count as lost. Return how many there were."""
        with self._rows.transaction(WRITE_WAIT):
            return self._rows.release(*tokens_of(owner))

    def close(self) -> None:
        """Close its connections. Idempotent."""
        self._line.close()
        super().close()


class AsyncPostgreSqlConnector(BackgroundConnector):
    """An `AsyncConnector` over a queue in a PostgreSQL database; settings as for `PostgreSqlConnector`.

    A call that is canceled before its turn does not happen. One that is already running completes first;
    if it was a fetch, it gives back what it took.
    """

    kind = "PostgreSQL"
    log = OwnLogger(logging.getLogger("onceward.connectors.postgresql"))
    threads = 4

    def __init__(self, url: str | URL, queue: str, **settings: Unpack[LeaseSettings]) -> None:
        self._queue = PostgreSqlConnector(url, queue, **settings)
        super().__init__(self._queue)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """As `PostgreSqlConnector.fetch_transactions`. Canceled, it gives back what it took."""
        stop = engine_stop()
        if stop is None:
            return await super().fetch_transactions_async(batch_size, **extra)
        stopping: AbstractContextManager[None] = stop.calling(self._hasten)
        with stopping:
            return await super().fetch_transactions_async(batch_size, **extra)

    async def await_transactions_async(self, seconds: float, /) -> bool:
        """As `PostgreSqlConnector.await_transactions`."""
        if self._queue.is_working():
            await pause(min(seconds, BUSY_LOOK))
        return True

    def joins(self, transaction: DbTransaction) -> bool:
        """As `PostgreSqlConnector.joins`."""
        return self._queue.joins(transaction)

    def settle_in(self, transaction: DbTransaction, delivered: Transaction, /) -> bool:
        """As `PostgreSqlConnector.settle_in`."""
        return self._queue.settle_in(transaction, delivered)

    def _hasten(self) -> None:
        self._queue.end_wait()

    async def release_owner_async(self, owner: str) -> int:
        """As `PostgreSqlConnector.release_owner`."""
        return await self._call(self._queue.release_owner, owner)
