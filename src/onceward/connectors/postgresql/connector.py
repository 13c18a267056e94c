"""The connector for threads, and the one for asyncio, which makes the same calls on threads of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Unpack

from sqlalchemy.engine import URL

from onceward.backoff import Backoff
from onceward.connectors.background import BackgroundConnector
from onceward.connectors.codec import DecodeError, decode, encode_all
from onceward.connectors.lease_rules import LeaseRules, LeaseSettings
from onceward.connectors.leases import WRITE_WAIT, LeasingConnector
from onceward.connectors.owners import tokens_of
from onceward.connectors.postgresql.address import database_of
from onceward.connectors.postgresql.schema import BATCH, WAITING
from onceward.connectors.postgresql.store import PostgreSqlLeaseStore
from onceward.db.listen import ListenLine
from onceward.db.transaction import DbTransaction
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Transaction

LOOK_AGAIN = Backoff(0.005, cap=0.5)
"""Between two looks for messages that wait in line."""
LOOK_IN_LINES = 1.0
"""Seconds between two looks of a consumer without order, if it finds nothing, for what one with order has left."""
SHORTEST_WAIT = 0.005
"""Seconds. A message that another transaction is just taking looks available."""


class PostgreSqlConnector(LeasingConnector):
    """A `Connector` over a queue in a PostgreSQL database, for any number of processes and machines.

    Creates its tables at its first use. `LeaseRules` explains `lease`, `max_deliveries`, `redelivery_delay` and
    `on_failure`; use the same values in every process of a queue. Leases and delays are measured by the clock of the
    server. Each connector has up to five connections: two that it keeps, one for when there is much to do, one
    for calls that are one statement, and one that listens for messages.
    """

    def __init__(self, url: str | URL, queue: str, **settings: Unpack[LeaseSettings]) -> None:
        self._rows = PostgreSqlLeaseStore(database_of(url), queue)
        super().__init__(self._rows, LeaseRules(**settings))
        self._empty_looks = 0
        self._look_in_lines_at = 0.0
        self.line = ListenLine(
            self._rows.engine, self._rows.channel, f"queue {queue}", presence=(WAITING, queue)
        )

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take at most `batch_size` transactions; a suspect (`LeaseRules.suspect_after`) is delivered alone."""
        self._rows.tidy()
        taken = None if extra or batch_size < 1 else self._take_new(batch_size)
        if taken is None:
            taken = super().fetch_transactions(batch_size, **extra)
        if not taken and self._lines is None and self._was_left_in_line():
            taken = super().fetch_transactions(batch_size, **extra)
        self.line.looked(bool(taken))
        self._empty_looks = 0 if taken else self._empty_looks + 1
        if len(taken) == batch_size:
            self.line.step_aside()
        return taken

    def _was_left_in_line(self) -> bool:
        """Whether there was something that waits in a line, and nobody keeps order any more."""
        if time.monotonic() < self._look_in_lines_at:
            return False
        self._look_in_lines_at = time.monotonic() + LOOK_IN_LINES
        return self._rows.end_lines()

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Put these at the end of the queue, all or none."""
        if len(transactions) > BATCH:
            super().dispatch_transactions(transactions)
        elif transactions:
            self._rows.append_alone(encode_all(transactions), 0.0, WRITE_WAIT)

    def _take_new(self, size: int) -> Sequence[Transaction] | None:
        """Take messages that nobody was given before, in one round trip. None if others are to be looked at."""
        if self._suspect_after < 1 or self._lines is not None:
            return None  # each is a suspect, or has to line up
        token = self._new_token()
        rows = self._rows.claim_new(size, token, self.lease)
        if rows is None:
            return None
        try:
            taken = [decode(body) for _, body in rows]
        except DecodeError:
            with self._rows.transaction(WRITE_WAIT):
                for seq, _ in rows:
                    self._rows.give_back(seq, token, 0.0)
            return None  # one of them is to be buried
        for (seq, _), transaction in zip(rows, taken, strict=True):
            self._deliveries.record(transaction, (seq, token), 1)
        return taken

    def await_transactions(self, seconds: float, /) -> bool:
        """See `onceward.connectors.base`."""
        due = self.begin_wait()
        return due <= 0 or self.line.wait(min(due, seconds)) or due <= seconds

    def begin_wait(self) -> float:
        """Listen for messages. Return how long until one is available, if none arrives."""
        if self.line.begin():
            return 0.0
        due = max(self._rows.seconds_until_due(), SHORTEST_WAIT)
        if (
            self._lines is not None and self._rows.has_parked()
        ):  # nobody tells when their predecessors are done
            return min(due, LOOK_AGAIN.delay(self._empty_looks))
        return due

    def joins(self, transaction: DbTransaction) -> bool:
        """Whether its queue is in the database of this transaction: see `onceward.inbox.sessions.acknowledgment`."""
        return self._rows.joins(transaction.connection)

    def settle_in(self, transaction: DbTransaction, delivered: Transaction, /) -> bool:
        """Remove a delivery as done, inside this transaction. Return False if its lease was lost."""
        if not self.holds(delivered):
            return False
        delivery = self._deliveries.of(delivered)
        delivery.leaving = True
        return self._rows.remove_in(transaction, delivery.held, delivered)

    def settle_all_in(
        self, transaction: DbTransaction, delivered: Sequence[Transaction], /
    ) -> Sequence[Transaction]:
        """As `settle_in`, of all of them. Return those whose lease was not lost."""
        held = {}
        for each in delivered:
            if self.holds(each):
                delivery = self._deliveries.of(each)
                delivery.leaving = True
                held[delivery.held] = each
        return self._rows.remove_all_in(transaction, held)

    def release_owner(self, owner: str) -> int:
        """End the leases of a dead owner now; they count as lost. Return how many there were."""
        with self._rows.transaction(WRITE_WAIT):
            return self._rows.release(*tokens_of(owner))

    def close(self) -> None:
        """Close its connections. Idempotent."""
        self.line.close()
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

    async def await_transactions_async(self, seconds: float, /) -> bool:
        """As `PostgreSqlConnector.await_transactions`."""
        due = await self._call(self._queue.begin_wait)
        return due <= 0 or await self._queue.line.wait_async(min(due, seconds)) or due <= seconds

    def joins(self, transaction: DbTransaction) -> bool:
        """As `PostgreSqlConnector.joins`."""
        return self._queue.joins(transaction)

    def settle_in(self, transaction: DbTransaction, delivered: Transaction, /) -> bool:
        """As `PostgreSqlConnector.settle_in`."""
        return self._queue.settle_in(transaction, delivered)

    def settle_all_in(
        self, transaction: DbTransaction, delivered: Sequence[Transaction], /
    ) -> Sequence[Transaction]:
        """As `PostgreSqlConnector.settle_all_in`."""
        return self._queue.settle_all_in(transaction, delivered)

    async def release_owner_async(self, owner: str) -> int:
        """As `PostgreSqlConnector.release_owner`."""
        return await self._call(self._queue.release_owner, owner)
