"""The connector for threads, and the one for asyncio, which runs the same code on its own thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from onceward._files.identity import WAL
from onceward._process.watch import FileWatch
from onceward.connectors.background import BackgroundConnector
from onceward.connectors.lease_rules import LeaseRules, LeaseSettings
from onceward.connectors.leases import FETCH_WAIT, WRITE_WAIT, LeasingConnector, seconds_until_due
from onceward.connectors.owners import tokens_of
from onceward.connectors.sqlite.database import Synchronous
from onceward.connectors.sqlite.store import SqliteLeaseStore
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.db.transaction import DbTransaction


class SqliteConnector(LeasingConnector):
    """A `Connector` over one file on a local disk, without a server, for any number of processes.

    Creates the file if it does not exist; its directory must. With `synchronous="FULL"`, whatever was
    dispatched or settled survives a power cut; with "NORMAL" it survives a crash of the process, but a power
    cut may undo the last calls. `LeaseRules` explains `lease`, `max_deliveries`, `redelivery_delay` and
    `on_failure`; use the same values in every process of a queue. Leases and delays are measured by the time
    since the machine started, which nobody can set; a `clock`, for tests, returns seconds since the epoch, the
    same in all processes.

    With `queue`, it is a queue in the application's database, beside other tables. Messages then leave it in the
    transactions of their handlers, and a fetch waits while one of them is open: SQLite has one writer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        queue: str | None = None,
        synchronous: Synchronous = "FULL",
        clock: Callable[[], float] | None = None,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        self._rows = SqliteLeaseStore(path, synchronous, queue)
        super().__init__(self._rows, LeaseRules(**settings), clock)
        if queue is not None:
            self._fetch_wait = max(FETCH_WAIT, self.lease / 6)
        self.watch = FileWatch(self._rows.path, f"{self._rows.path.resolve()}{WAL}")
        self.await_transactions = None if clock else self._await
        """See `onceward.connectors.base`. How long a test's clock takes is not known, so nothing can wait for it."""

    def seconds_until_due(self) -> float:
        """How long until a message is available, if none arrives."""
        return seconds_until_due(self._rows, self._now)

    def _await(self, seconds: float, /) -> bool:
        due = self.seconds_until_due()
        return due <= 0 or self.watch.wait(min(due, seconds)) or due <= seconds

    def close(self) -> None:
        """Close the file. Idempotent."""
        super().close()
        self.watch.close()

    def joins(self, transaction: DbTransaction) -> bool:
        """Whether its queue is in the database of this transaction: see `onceward.inbox.sessions.acknowledgment`."""
        from onceward.connectors.sqlite.join import is_joint  # here: a queue of its own needs no SQLAlchemy

        return is_joint(transaction.connection, self._rows.path)

    def settle_in(self, transaction: DbTransaction, delivered: Transaction, /) -> bool:
        """Remove a delivery as done, inside this transaction. Return False if its lease was lost."""
        from onceward.connectors.sqlite.join import remove_in

        if not self.holds(delivered):
            return False
        delivery = self._deliveries.of(delivered)
        delivery.leaving = True
        return remove_in(transaction.connection, self._rows.queue, delivery.held, delivered)

    def release_owner(self, owner: str) -> int:
        """End the leases of a dead owner now; they count as lost. Return how many there were."""
        with self._rows.transaction(WRITE_WAIT):
            return self._rows.release(*tokens_of(owner), self._now())


class AsyncSqliteConnector(BackgroundConnector):
    """An `AsyncConnector` over one file; settings as for `SqliteConnector`.

    A call that is canceled before its turn does not happen. One that is already running completes first;
    if it was a fetch, it gives back what it took.
    """

    kind = "SQLite"
    log = OwnLogger(logging.getLogger("onceward.connectors.sqlite.aio"))

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        queue: str | None = None,
        synchronous: Synchronous = "FULL",
        clock: Callable[[], float] | None = None,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        self._queue = SqliteConnector(path, queue=queue, synchronous=synchronous, clock=clock, **settings)
        super().__init__(self._queue)
        self.await_transactions_async = None if clock else self._await
        """As `SqliteConnector.await_transactions`."""

    async def _await(self, seconds: float, /) -> bool:
        due = await self._call(self._queue.seconds_until_due)
        return due <= 0 or await self._queue.watch.wait_async(min(due, seconds)) or due <= seconds

    def joins(self, transaction: DbTransaction) -> bool:
        """As `SqliteConnector.joins`."""
        return self._queue.joins(transaction)

    def settle_in(self, transaction: DbTransaction, delivered: Transaction, /) -> bool:
        """As `SqliteConnector.settle_in`."""
        return self._queue.settle_in(transaction, delivered)

    async def release_owner_async(self, owner: str) -> int:
        """As `SqliteConnector.release_owner`."""
        return await self._call(self._queue.release_owner, owner)
