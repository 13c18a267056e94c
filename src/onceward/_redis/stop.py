"""Stop signals: set from a signal handler, another thread or the loop itself; they end a wait for Redis at once.

Neither takes a lock, so neither can deadlock with the code it interrupts. A stop is permanent.
"""

from __future__ import annotations

import asyncio
import os
import select
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class BlockingStop:
    """For threads: a pipe that is readable once stopped, so one poll can watch it and a socket."""

    def __init__(self) -> None:
        self.requested = False
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._fd, self._end = os.pipe()
        os.set_blocking(self._end, False)
        weakref.finalize(self, _close, self._fd, self._end)

    def fd(self) -> int:
        if self._pid != os.getpid():
            # After a fork the parent shares the pipe, and must not be stopped.
            self._open()
            if self.requested:
                self.request()
        return self._fd

    def request(self) -> None:
        self.requested = True
        self.fd()
        with suppress(BlockingIOError):  # the pipe is full of earlier requests
            os.write(self._end, b".")

    async def pause(self, seconds: float) -> None:
        """Wait that long, or until stopped."""
        poll = select.poll()
        poll.register(self.fd(), select.POLLIN)
        poll.poll(seconds * 1000)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


class AsyncStop:
    """For asyncio: calls back, in the event loop of the waiting task."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting: dict[object, tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = {}

    def request(self) -> None:
        self.requested = True
        for loop, callback in list(self._waiting.values()):
            with suppress(RuntimeError):  # the loop is closed; nothing waits there
                loop.call_soon_threadsafe(callback)

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call it when a stop is requested. Check `requested` inside: an earlier stop does not call back."""
        key = object()
        self._waiting[key] = (asyncio.get_running_loop(), callback)
        try:
            yield
        finally:
            del self._waiting[key]

    async def pause(self, seconds: float) -> None:
        """Wait that long, or until stopped."""
        over = asyncio.Event()
        with self.calling(over.set), suppress(TimeoutError):
            if not self.requested:
                await asyncio.wait_for(over.wait(), seconds)
