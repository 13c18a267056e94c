"""Append the entries of many callers in few round trips: those that arrive during one go with the next."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from onceward._sync import run_blocking
from onceward.connectors.redis_streams.protocol import Entry

LOAD = 100
"""About how many entries of several callers are sent together; one caller's are never split. Redis does nothing else
while it appends them."""


class BlockingCoalescer:
    """For threads: the first caller sends for all that arrive meanwhile, and all get the same result."""

    def __init__(self, append: Callable[[Sequence[Entry]], Coroutine[Any, Any, Any]]) -> None:
        self._append = append
        self._lock = threading.Lock()
        self._next: _Load | None = None
        self._sending = threading.Lock()

    def send(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        with self._lock:
            leads = self._next is None
            load = self._next = self._next or _Load()
            load.entries += entries
        if leads:
            with self._sending:
                with self._lock:
                    self._next = None
                try:
                    run_blocking(self._append(load.entries))
                except BaseException as error:  # noqa: BLE001  every caller raises it; none may wait forever
                    load.error = error
                load.sent.set()
        load.sent.wait()
        if load.error is not None:
            raise load.error


class _Load:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.sent = threading.Event()
        self.error: BaseException | None = None


class AsyncCoalescer:
    """For asyncio: one task sends for all callers of the same turn of the event loop, and those that arrive meanwhile.

    It sends about a `LOAD` at a time, so callers whose entries are sent can continue while the others wait. A canceled
    caller does not stop the others' entries; its own are sent, too.
    """

    def __init__(self, append: Callable[[Sequence[Entry]], Awaitable[Any]]) -> None:
        self._append = append
        self._waiting: deque[tuple[asyncio.Future[None], Sequence[Entry]]] = deque()
        self._sender: asyncio.Task[None] | None = None

    def send(self, entries: Sequence[Entry]) -> Awaitable[None]:
        """Return an awaitable that is done when they are in Redis."""
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()
        if not entries:
            sent.set_result(None)
            return sent
        self._waiting.append((sent, entries))
        if self._sender is None:
            self._sender = loop.create_task(self._send_all())
        return sent

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

    def _load(self) -> tuple[list[asyncio.Future[None]], list[Entry]]:
        """Take what to send next, in order. A caller's entries stay together: they are appended all or none."""
        callers: list[asyncio.Future[None]] = []
        entries: list[Entry] = []
        while self._waiting and len(entries) < LOAD:
            sent, more = self._waiting.popleft()
            callers.append(sent)
            entries += more
        return callers, entries
