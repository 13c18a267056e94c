"""Stop signals: set from a signal handler, another thread or the loop itself; they end every wait of a consumer.

Neither takes a lock, so neither can deadlock with the code it interrupts. A stop is permanent.
"""

from __future__ import annotations

import asyncio
import os
import select
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from onceward._process.aside import Stopped, call_aside
from onceward.telemetry.context import current_work

T = TypeVar("T")

LAST_WAIT: Final = 0.8
"""Seconds after a stop for the answer to a call whose outcome matters, such as an acknowledgment."""


class BlockingStop:
    """For threads: a pipe that is readable once stopped, so one poll can watch it and a socket."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting: dict[object, Callable[[], None]] = {}
        self._pipe: tuple[int, int, int] | None = None
        """Its process and both ends; opened when something waits for it."""

    def fd(self) -> int:
        if self._pipe is None or self._pipe[0] != os.getpid():
            # After a fork the parent shares the pipe, and must not be stopped.
            read, write = os.pipe()
            os.set_blocking(write, False)
            weakref.finalize(self, _close, read, write)
            self._pipe = os.getpid(), read, write
            if self.requested:
                self._ring(self._pipe)
        return self._pipe[1]

    def request(self) -> None:
        self.requested = True
        if self._pipe is not None and self._pipe[0] == os.getpid():
            self._ring(self._pipe)
        for callback in list(self._waiting.values()):
            callback()

    def _ring(self, pipe: tuple[int, int, int]) -> None:
        with suppress(BlockingIOError):  # the pipe is full of earlier requests
            os.write(pipe[2], b".")

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call it when a stop is requested, in a signal handler or another thread. Check `requested` inside: an
        earlier stop does not call back."""
        key = object()
        self._waiting[key] = callback
        try:
            yield
        finally:
            del self._waiting[key]

    def leave(self, function: Callable[..., T], *arguments: Any, grace: float = 0.0) -> T:
        """Return what the function returns. Raises `Stopped` if that takes longer than `grace` seconds after a stop."""
        return call_aside(function, *arguments, stop=self, grace=grace)

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
        for key, (loop, _) in list(self._waiting.items()):
            with suppress(RuntimeError):  # the loop is closed; nothing waits there
                loop.call_soon_threadsafe(self._call, key)

    def _call(self, key: object) -> None:
        if key in self._waiting:  # it still waits
            self._waiting[key][1]()

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call it when a stop is requested. Check `requested` inside: an earlier stop does not call back."""
        key = object()
        self._waiting[key] = (asyncio.get_running_loop(), callback)
        try:
            yield
        finally:
            del self._waiting[key]

    async def leave(self, function: Callable[..., Awaitable[T]], *arguments: Any, grace: float = 0.0) -> T:
        """As `BlockingStop.leave`: what was called is canceled."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                with self.hastening(limit, grace):
                    return await function(*arguments)
        except TimeoutError:
            if limit.expired():
                raise Stopped("a stop came before the answer") from None
            raise

    @contextmanager
    def hastening(self, limit: asyncio.Timeout, grace: float = LAST_WAIT) -> Iterator[None]:
        """Leave the block only `grace` seconds after a stop, if `limit` leaves more."""
        now = asyncio.get_running_loop().time

        def hasten() -> None:
            due = limit.when()
            limit.reschedule(now() + grace if due is None else min(due, now() + grace))

        with self.calling(hasten):
            if self.requested:
                hasten()
            yield

    async def pause(self, seconds: float) -> None:
        """Wait that long, or until stopped."""
        over = asyncio.Event()
        with self.calling(over.set), suppress(TimeoutError):
            if not self.requested:
                await asyncio.wait_for(over.wait(), seconds)


async def pause(seconds: float) -> None:
    """Wait that long, in a thread or a task, or until the engine's call is stopped whose source is asked here."""
    stop = engine_stop()
    if stop is None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            stop = BlockingStop()
        else:
            stop = AsyncStop()
    await stop.pause(seconds)


def engine_stop() -> Any:
    """The stop of the engine's call whose source is asked here, for threads or asyncio; None elsewhere.

    Handlers have none: work in flight is finished.
    """
    return getattr(current_work.get(), "halt", None)


def is_stopped() -> bool:
    """Whether the engine's call whose source is asked here is stopped."""
    stop = engine_stop()
    return stop is not None and stop.requested
