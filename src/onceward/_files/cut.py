"""Whether a SQLite database in WAL mode has lost a part of its files: SQLite trusts the sizes that it has in memory.

A file that became shorter need not have lost anything: a vacuum or a checkpoint does that, too. The index of the log
(`-shm`) says how many pages the database has, how many of them are in the log (`-wal`), and how many of those have been
copied into the database. All others must be in its file.
"""

from __future__ import annotations

import os
import struct
import time

FRAME_HEADER, LOG_HEADER = 24, 32
"""Bytes, of each page in the log and of the log itself."""
LOOKS, PAUSE = 5, 0.002
"""How often to look, and the seconds between, while another process moves pages."""

_INDEX = struct.Struct("=12xBxHII")
"""In the index: whether it is there, the size of a page, pages in the log, and pages of the database."""
_COPIED = 96
"""Where the index has the number of pages that were copied."""

_opened: dict[tuple[int, int], int] = {}
"""Indexes that were read, by device and inode. They stay open: closing one would drop SQLite's locks on it."""


def lost_pages(database: str) -> int:
    """Return how many pages are neither in the file nor in its log; 0 if that is unknown, as in other modes."""
    try:
        index = _open(f"{database}-shm")
    except OSError:
        return 0
    before = None
    for _ in range(LOOKS):
        found = _look(database, index)
        if found == before or found[-1] == 0:
            return found[-1]
        before = found
        time.sleep(PAUSE)
    return 0


def _look(database: str, index: int) -> tuple[bytes, int]:
    """Return what the index says, and how many pages are lost by it."""
    said = os.pread(index, _COPIED + 4, 0)
    if len(said) < _COPIED + 4:
        return said, 0
    is_there, page, logged, pages = _INDEX.unpack_from(said)
    page = (page & 0xFE00) + ((page & 1) << 16)
    if not (is_there and page and pages):
        return said, 0
    (copied,) = struct.unpack_from("=I", said, _COPIED)
    in_log = _pages_of_log(f"{database}-wal", page, copied, logged)
    short = logged - copied - len(in_log)
    try:
        in_file = os.stat(database).st_size // page
    except OSError:
        return said, 0
    missing = max(pages - in_file, 0) - sum(in_file < each <= pages for each in set(in_log))
    return said, max(missing, 0) + max(short, 0)


def _pages_of_log(path: str, page: int, first: int, last: int) -> list[int]:
    """The numbers of the pages in these places of the log, as far as they are there."""
    found: list[int] = []
    if first >= last:
        return found
    try:
        with open(path, "rb", buffering=0) as log:  # SQLite has no locks on this file
            size = os.fstat(log.fileno()).st_size
            for place in range(first, last):
                at = LOG_HEADER + place * (FRAME_HEADER + page)
                if at + FRAME_HEADER + page > size:
                    break
                found.append(int.from_bytes(os.pread(log.fileno(), 4, at), "big"))
    except OSError:
        pass
    return found


def _open(path: str) -> int:
    there = os.stat(path)
    key = there.st_dev, there.st_ino
    if key not in _opened:
        _opened[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return _opened[key]
