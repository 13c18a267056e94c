"""Forks of a process whose threads use SQLite.

A thread of the parent is not in the child, but the locks that it held stay locked. SQLite has a few for the whole
process, and guards none of them against a fork. So a child first shows that it can use SQLite. One that cannot has run
nothing yet, and is forked again.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

USABLE_WITHIN = tuple(0.25 * number for number in range(1, 21))
"""Seconds that a child has to use SQLite, which takes a millisecond: for each time that it is forked."""
UNUSABLE = (
    "every process that this one forks hangs when it opens a SQLite database: a lock of SQLite is held here, by a "
    "thread that is always in it, or by one that was lost when this process was itself forked"
)


@contextmanager
def fork_beside_threads() -> Iterator[None]:
    """Python warns about a fork while threads run. Of the locks that they might hold, the child touches only
    SQLite's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def use_sqlite_or_end(limit: float) -> None:
    """End this process if a thread of the parent held a lock of SQLite at the fork: it can never be taken here."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, limit)
    with suppress(Exception):  # an audit hook of the user may refuse it
        _use_sqlite()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


def _use_sqlite() -> None:
    """Take each lock that all of its connections share: for files, memory, pages and random numbers."""
    sqlite3.connect(os.devnull).close()
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE pages AS SELECT randomblob(8)")
