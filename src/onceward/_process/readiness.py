"""Waits until one of several files can be read: pipes, sockets, inotify. A stop of the engine's call ends them, too."""

from __future__ import annotations

import asyncio
import os
import select
import weakref
from contextlib import nullcontext, suppress
from typing import Any

from onceward._process.stop import engine_stop


def wait_readable(fds: list[int], seconds: float) -> bool:
    """Return whether one of these can be read; False after `seconds`, or when the engine's call is stopped."""
    stop: Any = engine_stop()
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    if stop is not None:
        poll.register(stop.fd(), select.POLLIN)
    ready = {fd for fd, _ in poll.poll(max(seconds, 0.0) * 1000)}
    return not ready.isdisjoint(fds)


async def wait_readable_async(fds: list[int], seconds: float) -> bool:
    """As `wait_readable`, in a task. No other task may wait for the same files in this event loop."""
    stop: Any = engine_stop()
    if stop is not None and stop.requested:
        return False
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    ready: list[int] = []

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def note(fd: int) -> None:
        ready.append(fd)
        end()

    # Not `asyncio.wait_for`, which needs a task and two more turns of the event loop.
    timer = loop.call_later(max(seconds, 0.0), end)
    with nullcontext() if stop is None else stop.calling(end):
        for fd in fds:
            loop.add_reader(fd, note, fd)
        try:
            await over
        finally:
            timer.cancel()
            for fd in fds:
                loop.remove_reader(fd)
    return bool(ready)


class Doorbell:
    """A file that can be read once another thread has rung, until `clear`. One thread or task waits for it."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int, int] | None = None
        """Its process and both ends."""

    def fd(self) -> int:
        return self._open()[1]

    def ring(self) -> None:
        """From any thread, and safe in a signal handler."""
        with suppress(BlockingIOError):  # it is full of earlier rings
            os.write(self._open()[2], b".")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._open()[1], 65536)

    def _open(self) -> tuple[int, int, int]:
        if self._pipe is None or self._pipe[0] != os.getpid():  # after a fork, it would ring in the parent
            read, write = os.pipe()
            os.set_blocking(read, False)
            os.set_blocking(write, False)
            weakref.finalize(self, _close_both, read, write)
            self._pipe = os.getpid(), read, write
        return self._pipe


def _close_both(read: int, write: int) -> None:
    os.close(read)
    os.close(write)
