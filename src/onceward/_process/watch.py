"""Waits until any process writes to a file: with inotify where there is one, otherwise by looking at it often.

A watch remembers what was written since the last wait, so nothing is missed between a look at the file and the next
wait. The first wait returns at once.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from contextlib import suppress
from time import monotonic, time_ns
from typing import Any

from onceward._process.readiness import wait_readable, wait_readable_async
from onceward._process.stop import is_stopped

FIRST_LOOK, LOOK_EVERY = 0.001, 0.02
"""Seconds between two looks without inotify: short at first, as a next message often follows the last."""
_IN_MODIFY, _IN_IGNORED, _IN_CLOSE_ON_EXEC, _IN_NONBLOCK = 0x2, 0x8000, 0o2000000, 0o4000
_EVENT = struct.Struct("iIII")
_ENOUGH = 65536
TICK = 20_000_000
"""Nanoseconds in which two writes may get the same time."""


class FileWatch:
    """Watches files that exist, and those that do not exist yet. Belongs to one thread or task at a time."""

    def __init__(self, *paths: str | os.PathLike[str]) -> None:
        self._paths = [os.fspath(path) for path in paths]
        self._pid = 0
        self._fd: int | None = None
        """Of inotify. Readable once something was written."""
        self._seen: Any = None

    def wait(self, seconds: float, *doors: int) -> bool:
        """Return whether something was written, or one of the other files, `doors`, can be read. Ends early if the
        engine's call is stopped."""
        if self._is_written():
            return True
        if self._fd is not None:
            ready = wait_readable([self._fd, *doors], seconds)
            return self._is_written() or ready
        until, look = monotonic() + seconds, FIRST_LOOK
        while not is_stopped() and (left := until - monotonic()) > 0:
            if wait_readable([*doors], min(left, look)) or self._is_written():
                return True
            look = min(look * 2, LOOK_EVERY)
        return False

    async def wait_async(self, seconds: float) -> bool:
        """As `wait`, in a task."""
        if self._is_written():
            return True
        if self._fd is not None:
            await wait_readable_async([self._fd], seconds)
            return self._is_written()
        until, look = monotonic() + seconds, FIRST_LOOK
        while not is_stopped() and (left := until - monotonic()) > 0:
            await wait_readable_async([], min(left, look))
            if self._is_written():
                return True
            look = min(look * 2, LOOK_EVERY)
        return False

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._pid = 0

    def __del__(self) -> None:
        self.close()

    def _is_written(self) -> bool:
        if self._pid != os.getpid():  # after a fork, parent and child would take each other's news
            self.close()
            self._pid = os.getpid()
            self._fd = _open_inotify()
            self._seen = None
        if self._fd is not None:
            if self._seen is None or self._identities() != self._seen:
                return self._begin()
            with suppress(BlockingIOError):
                events = os.read(self._fd, _ENOUGH)
                if any(mask & _IN_IGNORED for _, mask, *_ in _EVENT.iter_unpack(events)):
                    return self._begin()  # a file is gone; the one in its place may have its number
                return True
            return False
        before, self._seen = self._seen, [_sign(path) for path in self._paths]
        now = time_ns()
        return before != self._seen or any(each and 0 <= now - each[1] < TICK for each in self._seen)

    def _begin(self) -> bool:
        """Watch the files that are there now. Look by oneself while one is missing, or inotify has no room."""
        assert self._fd is not None
        self._seen = self._identities()
        if None in self._seen or not all(_add(self._fd, path) for path in self._paths):
            os.close(self._fd)
            self._fd = None
            self._seen = None
            return self._is_written()
        return True

    def _identities(self) -> list[Any]:
        return [_identity(path) for path in self._paths]


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sign(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _open_inotify() -> int | None:
    """Return a descriptor, or None if there is no inotify or no room for another."""
    if not sys.platform.startswith("linux"):
        return None
    fd: int = ctypes.CDLL(None).inotify_init1(_IN_CLOSE_ON_EXEC | _IN_NONBLOCK)
    return fd if fd >= 0 else None


def _add(fd: int, path: str) -> bool:
    return bool(ctypes.CDLL(None).inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) >= 0)
