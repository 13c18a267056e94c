"""What wakes a relay when a message is committed: a notification of PostgreSQL, or a write to SQLite's files.

Neither is needed for correctness: a relay also looks by itself.
"""

from __future__ import annotations

import os
from time import monotonic
from typing import Protocol

from sqlalchemy import Engine

from onceward._files.identity import WAL
from onceward._process.readiness import wait_readable
from onceward._process.stop import is_stopped
from onceward._process.watch import FileWatch
from onceward.backoff import Backoff
from onceward.db.listen import ListenLine
from onceward.outbox.rows import CHANNEL

LOOK_AGAIN = Backoff(0.002)
"""A commit to SQLite is written before it can be seen, and nobody knows how long its disk takes. So looks follow every
write, at growing intervals."""
BUSY_LOOK = 0.1
"""Seconds between two looks at a file that others change all the time. Writes further apart are not that."""
IN_VAIN = 6
"""Writes that are looked at one by one, although what was looked for was not in them."""


class News(Protocol):
    """Waits for commits. `begin` comes before each `wait`, and `looked` after each look at the table."""

    @property
    def hears(self) -> bool:
        """Whether every commit is known to end a wait."""
        ...

    def begin(self) -> bool:
        """Begin to listen. Return whether to look once more before a wait."""
        ...

    def wait(self, seconds: float, *doors: int) -> bool:
        """Return True if it is time to look, or one of the files `doors` can be read; False after `seconds`, or when
        the engine's call is stopped."""
        ...

    def looked(self, found: bool) -> None: ...
    def close(self) -> None: ...


def news_of(engine: Engine) -> News:
    if engine.dialect.name == "postgresql":
        return ListenLine(engine, CHANNEL, "the outbox")
    path = engine.url.database
    return FileNews(None if path in (None, "", ":memory:") else os.path.abspath(str(path)))


class FileNews:
    """Commits to a SQLite database, of whichever process; none for a database in memory."""

    hears = False

    def __init__(self, path: str | None) -> None:
        self._watch = FileWatch(*([] if path is None else [path, os.path.realpath(path) + WAL]))
        self._looks = 0
        """Since the last write."""
        self._in_vain = 0
        """Writes in a row that brought no message."""
        self._looked_at = self._written_at = 0.0

    def begin(self) -> bool:
        return False

    def looked(self, found: bool) -> None:
        self._looks += 1
        if found:
            self._in_vain = 0
        self._looked_at = monotonic()

    def wait(self, seconds: float, *doors: int) -> bool:
        pause = max(LOOK_AGAIN.delay(self._looks - 1), self._spacing())
        if not self._watch.wait(min(pause, seconds), *doors):
            return pause < seconds and not is_stopped()
        now = monotonic()
        self._in_vain = self._in_vain + 1 if now - self._written_at < BUSY_LOOK else 0
        self._looks = 0
        early = self._looked_at + self._spacing() - now
        if early > 0:
            wait_readable([*doors], min(early, seconds))
        self._written_at = monotonic()  # more may have been written meanwhile
        return True

    def _spacing(self) -> float:
        """Seconds between two looks, at least."""
        return min(LOOK_AGAIN.delay(self._in_vain - IN_VAIN), BUSY_LOOK)

    def close(self) -> None:
        self._watch.close()
