"""Stop signals: set from a signal handler, another thread or the loop itself; they end every wait of a consumer.

Neither takes a lock, so neither can deadlock with the code it interrupts. A stop is permanent.
"""

from __future__ import annotations

import asyncio
import os
import select
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from onceward._process.aside import Stopped, call_aside
from onceward.telemetry.context import current_work

T = TypeVar("T")

LAST_WAIT: Final = 0.8
"""Seconds after a stop for the answer to a call whose outcome matters, such as an acknowledgment."""


class Listed(Generic[T]):
    """Lists what a stop calls while a block runs. A generator with `contextmanager` would cost each exchange with a
    server three times as much."""

    __slots__ = ("_listed", "_waiting")

    def __init__(self, waiting: dict[object, T], listed: T) -> None:
        self._waiting, self._listed = waiting, listed

    def __enter__(self) -> None:
        self._waiting[self] = self._listed

    def __exit__(self, *_: object) -> None:
        del self._waiting[self]


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

    def calling(self, callback: Callable[[], None]) -> Listed[Callable[[], None]]:
        """Call it when a stop is requested, in a signal handler or another thread. Check `requested` inside: an
        earlier stop does not call back."""
        return Listed(self._waiting, callback)

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


LoopCallback = tuple[asyncio.AbstractEventLoop, Callable[[], None]]


class AsyncStop:
    """For asyncio: calls back, in the event loop of the waiting task."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting: dict[object, LoopCallback] = {}

    def request(self) -> None:
        self.requested = True
        for key, (loop, _) in list(self._waiting.items()):
            with suppress(RuntimeError):  # the loop is closed; nothing waits there
                loop.call_soon_threadsafe(self._call, key)

    def _call(self, key: object) -> None:
        if key in self._waiting:  # it still waits
            self._waiting[key][1]()

    def calling(self, callback: Callable[[], None]) -> Listed[LoopCallback]:
        """Call it when a stop is requested. Check `requested` inside: an earlier stop does not call back."""
        return Listed(self._waiting, (asyncio.get_running_loop(), callback))

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

    def hastening(self, limit: asyncio.Timeout, grace: float = LAST_WAIT) -> Hastening:
        """Leave the block only `grace` seconds after a stop, if `limit` leaves more."""
        return Hastening(self, self._waiting, limit, grace)

    async def pause(self, seconds: float) -> None:
        """Wait that long, or until stopped."""
        over = asyncio.Event()
        with self.calling(over.set), suppress(TimeoutError):
            if not self.requested:
                await asyncio.wait_for(over.wait(), seconds)


class Hastening:
    """See `AsyncStop.hastening`."""

    __slots__ = ("_grace", "_limit", "_loop", "_stop", "_waiting")

    def __init__(
        self, stop: AsyncStop, waiting: dict[object, LoopCallback], limit: asyncio.Timeout, grace: float
    ) -> None:
        self._stop, self._waiting, self._limit, self._grace = stop, waiting, limit, grace
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        self._waiting[self] = (self._loop, self._hasten)
        if self._stop.requested:
            self._hasten()

    def __exit__(self, *_: object) -> None:
        del self._waiting[self]

    def _hasten(self) -> None:
        due, latest = self._limit.when(), self._loop.time() + self._grace
        self._limit.reschedule(latest if due is None else min(due, latest))


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
