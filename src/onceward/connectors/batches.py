"""Send the entries of many callers in few round trips: those that arrive during one go with the next."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from onceward._sync import run_blocking

T = TypeVar("T")

LOAD = 100
"""About how many entries of several callers are sent together; one caller's are never split. Redis does nothing else
while it appends them."""


class BlockingCoalescer(Generic[T]):
    """For threads: a caller that finds nothing under way sends at once; of those that arrive meanwhile, the first sends
    for all, and all get the same result."""

    def __init__(self, append: Callable[[Sequence[T]], Any], *, blocks: bool = False) -> None:
        """`append` returns a coroutine whose ports block, or, with `blocks`, has sent them when it returns."""
        self._append = append if blocks else lambda entries: run_blocking(append(entries))
        self._lock = threading.Lock()
        self._next: _Load[T] | None = None
        self._sending = threading.Lock()

    def send(self, entries: Sequence[T]) -> None:
        if not entries:
            return
        if self._next is None and self._sending.acquire(blocking=False):
            try:
                self._append(entries)
            finally:
                self._sending.release()
            return
        with self._lock:
            load = self._next
            leads = load is None or len(load.entries) >= LOAD
            if load is None or leads:
                load = self._next = _Load()
            load.entries += entries
        if leads:
            self._send_load(load)
        else:
            load.sent.wait()
        if load.error is None:
            return
        if leads or isinstance(load.error, Exception):
            raise load.error
        # An exit of the thread that sent for all, such as a Ctrl-C, is not ours.
        raise InterruptedError(
            "the thread that was sending this with others was interrupted; it may have arrived"
        ) from load.error

    def _send_load(self, load: _Load[T]) -> None:
        try:
            with self._sending:
                with self._lock:
                    if self._next is load:
                        self._next = None
                self._append(load.entries)
        except BaseException as error:  # noqa: BLE001  every caller raises it; none may wait forever
            with self._lock:
                if self._next is load:
                    self._next = None
            load.error = error
        finally:
            load.sent.set()


class _Load(Generic[T]):
    def __init__(self) -> None:
        self.entries: list[T] = []
        self.sent = threading.Event()
        self.error: BaseException | None = None


class AsyncCoalescer(Generic[T]):
    """For asyncio: a caller that finds nothing under way sends at once; one task sends for all that arrive meanwhile.

    It sends about a `LOAD` at a time, so callers whose entries are sent can continue while the others wait. A canceled
    caller does not stop the others' entries; its own may be sent, too.
    """

    def __init__(self, append: Callable[[Sequence[T]], Awaitable[Any]]) -> None:
        self._append = append
        self._waiting: deque[tuple[asyncio.Future[None], Sequence[T]]] = deque()
        self._busy = False
        self._sender: asyncio.Task[None] | None = None

    async def send(self, entries: Sequence[T]) -> None:
        """Return when they have arrived."""
        if not entries:
            return
        if not self._busy:
            self._busy = True
            try:
                await self._append(entries)
            finally:
                if self._waiting:
                    self._sender = asyncio.get_running_loop().create_task(self._send_all())
                else:
                    self._busy = False
            return
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((sent, entries))
        await sent

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                callers, entries = self._load()
                error: BaseException | None = None
                try:
                    await self._append(entries)
                except BaseException as raised:  # noqa: BLE001
                    error = raised
                for sent in callers:
                    if sent.done():
                        continue  # its caller was canceled
                    if error is None:
                        sent.set_result(None)
                    else:
                        sent.set_exception(error)
        finally:
            self._sender = None
            self._busy = False

    def _load(self) -> tuple[list[asyncio.Future[None]], list[T]]:
        """Take what to send next, in order. A caller's entries stay together: they are appended all or none."""
        callers: list[asyncio.Future[None]] = []
        entries: list[T] = []
        while self._waiting and len(entries) < LOAD:
            sent, more = self._waiting.popleft()
            callers.append(sent)
            entries += more
        return callers, entries
