"""A moment without connections to a SQLite file, for a fork.

SQLite keeps what a process has locked in the memory of that process. A fork copies this, but not the locks: with a
transaction of the parent in it, a child finds the database locked until it ends. An idle connection does no harm.
"""

from __future__ import annotations

import os
import time

from sqlalchemy import Engine

OPEN_FILES = "/dev/fd"
LOOK_EVERY = 0.002


def await_quiet_file(engine: Engine, seconds: float) -> None:
    """Close the idle connections of this engine. Wait until this process has no other to its SQLite file, at most
    this long."""
    until = time.monotonic() + seconds
    engine.dispose()
    path = engine.url.database
    while engine.dialect.name == "sqlite" and path and is_open(path) and time.monotonic() < until:
        time.sleep(LOOK_EVERY)
        engine.dispose()


def is_open(path: str) -> bool:
    """Whether this process has the file open."""
    try:
        wanted = os.stat(path)
        numbers = os.listdir(OPEN_FILES)
    except OSError:  # in memory, or a system without this list
        return False
    return any(_is_same(int(number), wanted) for number in numbers)


def _is_same(number: int, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(number), wanted)
    except OSError:  # closed in the meantime
        return False
