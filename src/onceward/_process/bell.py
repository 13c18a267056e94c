"""Waits for work that this process itself appends, such as a fact in a boundary, in threads and in asyncio. A stop of
the engine ends them.

with bell.heard() as ear:      first listen, then look: what is appended in between is not missed
    if nothing_is_there():
        ear.wait(5.0)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from onceward._process.stop import engine_stop


class Bell:
    """`ring` wakes all that listen. It takes no lock, so any thread and a signal handler may ring."""

    def __init__(self) -> None:
        self._ears: dict[object, Callable[[], None]] = {}

    def ring(self) -> None:
        for wake in list(self._ears.values()):
            wake()

    @contextmanager
    def heard(self) -> Iterator[BlockingEar]:
        """Listen in a thread."""
        ear = BlockingEar()
        with self._listen(ear.wake):
            yield ear

    @contextmanager
    def heard_async(self) -> Iterator[AsyncEar]:
        """Listen in a task."""
        ear = AsyncEar()
        with self._listen(ear.wake):
            yield ear

    @contextmanager
    def _listen(self, wake: Callable[[], None]) -> Iterator[None]:
        key = object()
        self._ears[key] = wake
        try:
            yield
        finally:
            del self._ears[key]


class BlockingEar:
    def __init__(self) -> None:
        self._mail: SimpleQueue[bool] = SimpleQueue()
        self.wake = partial(self._mail.put, True)

    def wait(self, seconds: float) -> bool:
        """Return whether the bell rang since this began to listen. Ends early if the engine's call is stopped."""
        stop = engine_stop()
        with nullcontext() if stop is None else stop.calling(partial(self._mail.put, False)):
            if stop is not None and stop.requested:
                return False
            try:
                return self._mail.get(timeout=seconds)
            except Empty:
                return False


class AsyncEar:
    def __init__(self) -> None:
        self._rang = False
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        self._rang = True
        with suppress(RuntimeError):  # the loop is closed; nothing waits there
            self._loop.call_soon_threadsafe(self._over.set)

    async def wait(self, seconds: float) -> bool:
        """As `BlockingEar.wait`."""
        stop: Any = engine_stop()
        with nullcontext() if stop is None else stop.calling(self._over.set), suppress(TimeoutError):
            if not self._rang and (stop is None or not stop.requested):
                await asyncio.wait_for(self._over.wait(), seconds)
        return self._rang
