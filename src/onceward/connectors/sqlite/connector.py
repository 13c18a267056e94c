"""The connector for threads, and the one for asyncio, which runs the same code on its own thread."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack

from onceward._files.identity import WAL
from onceward._process.watch import FileWatch
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.lease_rules import LeaseRules, LeaseSettings
from onceward.connectors.leases import WRITE_WAIT, AsyncLeasingConnector, LeasingConnector
from onceward.connectors.owners import tokens_of
from onceward.connectors.sqlite.store import SqliteLeaseStore, Synchronous
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

P = ParamSpec("P")
T = TypeVar("T")

_log = OwnLogger(logging.getLogger("onceward.connectors.sqlite.aio"))


class SqliteConnector(LeasingConnector):
    """A `Connector` over one file on a local disk, without a server, for any number of processes.

    Creates the file if it does not exist; its directory must. With `synchronous="FULL"`, whatever was
    dispatched or settled survives a power cut; with "NORMAL" it survives a crash of the process, but a power
    cut may undo the last calls. `LeaseRules` explains `lease`, `max_deliveries`, `redelivery_delay` and
    `on_failure`; use the same values in every process of a queue. Leases and delays are measured by the time
    since the machine started, which nobody can set; a `clock`, for tests, returns seconds since the epoch, the
    same in all processes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Synchronous = "FULL",
        clock: Callable[[], float] | None = None,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        self._rows = SqliteLeaseStore(path, synchronous)
        super().__init__(self._rows, LeaseRules(**settings), clock)
        self.watch = FileWatch(self._rows.path, f"{self._rows.path.resolve()}{WAL}")
        self.await_transactions = None if clock else self._await
        """See `onceward.connectors.base`. How long a test's clock takes is not known, so nothing can wait for it."""

    def _await(self, seconds: float, /) -> bool:
        due = self.seconds_until_due()
        return due <= 0 or self.watch.wait(min(due, seconds)) or due <= seconds

    def close(self) -> None:
        """Close the file. Idempotent."""
        super().close()
        self.watch.close()

    def release_owner(self, owner: str) -> int:
        """End the leases of a dead owner now; they count as lost. Return how many there were."""
        with self._rows.transaction(WRITE_WAIT):
            return self._rows.release(*tokens_of(owner), self._now())


class AsyncSqliteConnector(AsyncLeasingConnector):
    """An `AsyncConnector` over one file; settings as for `SqliteConnector`.

    A call that is canceled before its turn does not happen. One that is already running completes first;
    if it was a fetch, it gives back what it took.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Synchronous = "FULL",
        clock: Callable[[], float] | None = None,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        self._queue = SqliteConnector(path, synchronous=synchronous, clock=clock, **settings)
        super().__init__(self._queue)
        self._closed = False
        self._pid = os.getpid()
        self._thread = _new_thread()
        self.await_transactions_async = None if clock else self._await
        """As `SqliteConnector.await_transactions`."""

    async def _await(self, seconds: float, /) -> bool:
        due = await self._call(self._queue.seconds_until_due)
        return due <= 0 or await self._queue.watch.wait_async(min(due, seconds)) or due <= seconds

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """As `SqliteConnector.fetch_transactions`. Canceled, it gives back what it took."""
        fetch = self._submit(self._wire.fetch_transactions, batch_size, **extra)
        cancelled = await _wait_for(fetch)
        if cancelled is None:
            return fetch.result()
        if not fetch.cancelled() and fetch.exception() is None:
            await self._give_back(fetch.result())
        raise cancelled

    def extend_from_thread(self, transactions: Sequence[Transaction], /) -> None:
        """See `AsyncConnector.extend_from_thread`."""
        self._submit(super().extend_from_thread, transactions).result()

    @property
    def owner(self) -> str | None:
        return self._queue.owner

    @owner.setter
    def owner(self, name: str | None) -> None:
        self._queue.owner = name

    async def release_owner_async(self, owner: str) -> int:
        """As `SqliteConnector.release_owner`."""
        return await self._call(self._queue.release_owner, owner)

    async def close_async(self) -> None:
        """As `SqliteConnector.close`. Running calls complete first."""
        if not self._closed:
            closing = self._submit(self._wire.close)
            self._closed = True
            self._thread.shutdown(wait=False)  # it exits after the last call
            cancelled = await _wait_for(closing, skippable=False)
            if cancelled is not None:
                raise cancelled
            closing.result()

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = self._submit(function, *args, **kwargs)
        cancelled = await _wait_for(call)
        if cancelled is not None:
            raise cancelled
        return call.result()

    def _submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._closed:
            raise ConnectorClosedError("this SQLite connector is closed; create a new one to continue")
        if self._pid != os.getpid():  # threads do not survive a fork
            self._pid = os.getpid()
            self._thread = _new_thread()
        # The context carries the current span to where the transactions are encoded.
        return self._thread.submit(copy_context().run, partial(function, *args, **kwargs))

    async def _give_back(self, transactions: Sequence[Transaction]) -> None:
        try:
            settling = self._submit(
                self._wire.settle_transactions,
                [Settlement(transaction, Verdict.RETURNED) for transaction in transactions],
            )
            await _wait_for(settling, skippable=False)
            settling.result()
        except Exception:  # noqa: BLE001 - the caller raises the cancellation, which matters more
            _log.warning(
                "a canceled fetch could not give back its messages; they come back when their leases expire",
                exc_info=True,
            )


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="onceward-sqlite")


async def _wait_for(call: Future[Any], *, skippable: bool = True) -> asyncio.CancelledError | None:
    """Wait until the call has ended, or will never begin. Return the cancellation that came meanwhile, if any."""
    ended = asyncio.wrap_future(call)
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as error:
            cancelled = error
            if skippable:
                call.cancel()  # has no effect on a running call
    if not ended.cancelled():
        ended.exception()  # marks it as retrieved, so asyncio does not log it
    return cancelled
