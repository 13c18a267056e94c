"""A leasing connector for asyncio that makes the blocking calls of another on threads of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypeVar

from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.batches import AsyncCoalescer
from onceward.connectors.codec import encode_all
from onceward.connectors.leases import AsyncLeasingConnector, LeasingConnector
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

P = ParamSpec("P")
T = TypeVar("T")


class BackgroundConnector(AsyncLeasingConnector):
    """Calls a blocking connector.

    A call that is canceled before its turn does not happen. One that is already running completes first;
    if it was a fetch, it gives back what it took.
    """

    kind: ClassVar[str]
    """For messages and the names of threads."""
    log: ClassVar[OwnLogger]
    threads: ClassVar[int] = 1

    def __init__(self, wire: LeasingConnector) -> None:
        super().__init__(wire)
        self._closed = False
        self._pid = os.getpid()
        self._pool = self._new_pool()
        self._out = AsyncCoalescer[bytes](lambda bodies: self._call(self._wire.dispatch_bodies, bodies))

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `LeasingConnector.dispatch_transactions`. Those of several tasks share a transaction."""
        if self._closed:
            raise self._closed_error()
        if transactions:
            await self._out.send(encode_all(transactions))
        else:
            await self._call(self._wire.dispatch_bodies, ())

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """As `LeasingConnector.fetch_transactions`. Canceled, it gives back what it took."""
        fetch = self._submit(self._wire.fetch_transactions, batch_size, **extra)
        cancelled = await _wait_for(fetch, self._hasten)
        if cancelled is None:
            return fetch.result()
        if not fetch.cancelled() and fetch.exception() is None:
            await self._give_back(fetch.result())
        raise cancelled

    def _hasten(self) -> None:
        """Called if a running fetch is canceled: if it waits for messages, it ends."""

    def extend_from_thread(self, transactions: Sequence[Transaction], /) -> None:
        """See `AsyncConnector.extend_from_thread`."""
        self._submit(super().extend_from_thread, transactions).result()

    @property
    def owner(self) -> str | None:
        return self._wire.owner

    @owner.setter
    def owner(self, name: str | None) -> None:
        self._wire.owner = name

    async def close_async(self) -> None:
        """As `LeasingConnector.close`. Running calls complete first."""
        if not self._closed:
            self._closed = True
            self._hasten()
            self._pool.shutdown(wait=False)  # its threads exit after the last call
            last = self._new_pool()
            closing = last.submit(self._close_after, self._pool)
            last.shutdown(wait=False)
            cancelled = await _wait_for(closing, skippable=False)
            if cancelled is not None:
                raise cancelled
            closing.result()

    def _close_after(self, pool: ThreadPoolExecutor) -> None:
        pool.shutdown(wait=True)
        self._wire.close()

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = self._submit(function, *args, **kwargs)
        cancelled = await _wait_for(call)
        if cancelled is not None:
            raise cancelled
        return call.result()

    def _submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._closed:
            raise self._closed_error()
        if self._pid != os.getpid():  # threads do not survive a fork
            self._pid = os.getpid()
            self._pool = self._new_pool()
        # The context carries the current span to where the transactions are encoded.
        return self._pool.submit(copy_context().run, partial(function, *args, **kwargs))

    def _closed_error(self) -> ConnectorClosedError:
        return ConnectorClosedError(f"this {self.kind} connector is closed; create a new one to continue")

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, thread_name_prefix=f"onceward-{self.kind.lower()}")

    async def _give_back(self, transactions: Sequence[Transaction]) -> None:
        try:
            settling = self._submit(
                self._wire.settle_transactions,
                [Settlement(transaction, Verdict.RETURNED) for transaction in transactions],
            )
            await _wait_for(settling, skippable=False)
            settling.result()
        except Exception:
            self.log.warning(
                "a canceled fetch could not give back its messages; they come back when their leases expire",
                exc_info=True,
            )


async def _wait_for(
    call: Future[Any], hasten: Callable[[], None] | None = None, *, skippable: bool = True
) -> asyncio.CancelledError | None:
    """Wait until the call has ended, or will never begin. Return the cancellation that came meanwhile, if any."""
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    while not call.done():
        # A future of our own, not `wrap_future`: canceling that would cancel the call, and to protect it costs a turn
        # of the event loop.
        ended: asyncio.Future[None] = loop.create_future()
        call.add_done_callback(partial(_tell, loop, ended))
        try:
            await ended
        except asyncio.CancelledError as error:
            cancelled = error
            # Canceling has no effect on a running call.
            if skippable and not call.cancel() and hasten is not None:
                hasten()
    return cancelled


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None], _: Future[Any]) -> None:
    """In the thread of the call."""
    with suppress(RuntimeError):  # the event loop is closed; nothing waits there
        loop.call_soon_threadsafe(_set, ended)


def _set(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
