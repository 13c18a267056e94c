"""Whether a file that is open is still the one at its path, and has something in it.

Deleting or replacing a file does not close it: a process goes on writing to the old one, and what it writes is gone
when the process is. SQLite notices that only in some of its journal modes. In WAL mode, it does not notice either that
a file was emptied or cut: it goes on with what it has in memory.
"""

from __future__ import annotations

import os
from os import stat
from pathlib import Path
from stat import S_ISREG

from onceward._files.cut import lost_pages
from onceward.errors import FileLostError

WAL = "-wal"
COMPANIONS = (WAL, "-shm")
"""The files that SQLite keeps beside a database in WAL mode, for as long as a connection is open."""

O_PATH = getattr(os, "O_PATH", 0)
"""Linux has it."""

Identity = tuple[int, int]
"""Device and inode."""


class OpenFile:
    """A file that was just opened. A symlink stands for the file it leads to."""

    __slots__ = ("_held", "_is_database", "_is_log", "_size", "identity", "path")

    def __init__(self, path: str | os.PathLike[str], *, hold: bool = False) -> None:
        """`hold` for a file that its user may close and open again: a new file could get the inode of a deleted one."""
        self.path = os.fspath(path)
        self._held = None
        self._is_database = False
        self._is_log = self.path.endswith(WAL)
        self._size = 0
        if hold and O_PATH:
            try:
                # O_PATH, because closing any other descriptor of a file would drop SQLite's locks on it.
                self._held = os.open(path, O_PATH | os.O_CLOEXEC)
            except OSError as error:
                raise FileLostError(_describe(self.path, _reason(error))) from None
        self.identity = identity_of(self.path if self._held is None else self._held)

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None:
            os.close(held)

    def check(self) -> None:
        """Raise `FileLostError` unless this is the file at its path."""
        try:
            found = stat(self.path)
        except OSError as error:
            raise FileLostError(_describe(self.path, _reason(error))) from None
        if 0 < self._size <= found.st_size and (found.st_dev, found.st_ino) == self.identity:
            self._size = (
                found.st_size
            )  # as nearly always: it has something in it, as the last time, and has not shrunk
            return
        self._judge(found)

    def _judge(self, found: os.stat_result) -> None:
        if (found.st_dev, found.st_ino) != self.identity:
            raise FileLostError(_describe(self.path, "was replaced by another file"))
        if found.st_size and not self._is_database:
            self._is_database = S_ISREG(found.st_mode) and not self.path.endswith(COMPANIONS)
        elif self._is_database and not found.st_size:  # a companion may be empty
            raise FileLostError(_describe_loss(self.path, "emptied", "what was in it"))
        if found.st_size < self._size and self._has_lost_pages():
            raise FileLostError(_describe_loss(self.path, "cut", "a part of what was in it"))
        self._size = found.st_size

    def _has_lost_pages(self) -> bool:
        if not self._is_database and not self._is_log:
            return False
        return lost_pages(os.path.realpath(self.path.removesuffix(WAL) if self._is_log else self.path)) > 0


def companions_of(path: str | os.PathLike[str]) -> list[OpenFile]:
    """The files beside a database that a connection has open. Ask inside its first transaction: they exist by then."""
    place = os.path.realpath(path)  # SQLite follows symlinks
    return [beside for each in COMPANIONS if (beside := OpenFile(place + each)).identity is not None]


def identity_of(path: str | int) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _reason(error: OSError) -> str:
    gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
    return "was deleted or moved" if gone else f"cannot be found any more ({error.strerror})"


def _describe_loss(path: str, happened: str, what: str) -> str:
    return (
        f"{path} was {happened} while it was open, and {what} is lost. Nothing more is acknowledged. Stop all "
        "processes that use it, and put a copy in its place"
    )


def _describe(path: str, happened: str) -> str:
    if path.endswith(COMPANIONS):
        database = Path(path.rpartition("-")[0])
        return (
            f"{path} {happened} while the database was open. It belongs to {database.name}, and the last commits are "
            "in it. Nothing more is acknowledged. Stop all processes that use the database, with SIGTERM and not with "
            "SIGKILL: the last one to close it writes those commits into it"
        )
    return (
        f"{path} {happened} while it was open. Nothing more is acknowledged: this process has the old file, and what "
        "it writes there is lost. Put the file back in its place, or restart the process to use what is there now"
    )
