"""What many append at once, in few round trips: whoever comes while one is under way goes with the next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from onceward.connectors.redis_streams.core import Entry


class Coalescer:
    """In threads: the first caller sends for all who come meanwhile, and all get the same answer."""

    def __init__(self, append: Callable[[Sequence[Entry]], Any]) -> None:
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
                    self._append(load.entries)
                except BaseException as error:  # noqa: BLE001  everybody's; nobody may wait for ever
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
    """In asyncio: one task sends for all who come in the same turn of the event loop, and meanwhile.

    A caller that is cancelled does not keep the others' entries from being sent; its own go, too.
    """

    def __init__(self, append: Callable[[Sequence[Entry]], Awaitable[Any]]) -> None:
        self._append = append
        self._entries: list[Entry] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._sender: asyncio.Task[None] | None = None

    async def send(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()
        self._entries += entries
        self._waiting.append(sent)
        if self._sender is None:
            self._sender = loop.create_task(self._send_all())
        await sent

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                entries, self._entries = self._entries, []
                waiting, self._waiting = self._waiting, []
                error: BaseException | None = None
                try:
                    await self._append(entries)
                except BaseException as raised:  # noqa: BLE001
                    error = raised
                for sent in waiting:
                    if sent.done():
                        continue  # its caller was cancelled
                    if error is None:
                        sent.set_result(None)
                    else:
                        sent.set_exception(error)
        finally:
            self._sender = None
