"""The locks that SQLite has for a whole process, held by a thread, and work that needs them."""

from __future__ import annotations

import _sqlite3
import ctypes
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

LOCKS = {"memory": 3, "random numbers": 5, "files": 11}
"""SQLITE_MUTEX_STATIC_…, which have had these numbers in every version."""
HELD = 0.4
"""Seconds: longer than the first child is waited for."""


@contextmanager
def held(lock: str) -> Iterator[None]:
    """Hold one of SQLite's locks."""
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_mutex_alloc.restype = ctypes.c_void_p
    mutex = ctypes.c_void_p(library.sqlite3_mutex_alloc(LOCKS[lock]))
    library.sqlite3_mutex_enter(mutex)
    try:
        yield
    finally:
        library.sqlite3_mutex_leave(mutex)


@contextmanager
def held_for_a_moment(lock: str) -> Iterator[None]:
    """A thread holds it, and lets go of it after the first fork."""
    taken = threading.Event()

    def hold() -> None:
        with held(lock):
            taken.set()
            time.sleep(HELD)

    with ThreadPoolExecutor(1) as threads:
        holding = threads.submit(hold)
        while not taken.wait(0.01) and not holding.done():
            pass
        yield
        holding.result()


def use_sqlite(folder: Path) -> str:
    """Note that it runs, and take all of these locks."""
    with (folder / "calls").open("a") as file:
        file.write("x")
    with closing(sqlite3.connect(folder / "any.db")) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS numbers AS SELECT random()")
    return "used"


def calls_in(folder: Path) -> int:
    """How often it has run there."""
    return len((folder / "calls").read_text())
