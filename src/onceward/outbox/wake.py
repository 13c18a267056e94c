"""What wakes a relay when a message is committed: a notification of PostgreSQL, or a number that SQLite changes.

Neither is needed for correctness: a relay also looks by itself, at least once a second.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from typing import Any

from sqlalchemy import Engine

from onceward._process.stop import engine_stop
from onceward._text import driver_message
from onceward.backoff import Backoff
from onceward.outbox.rows import CHANNEL
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.outbox"))

QUICK, SLOW = 0.004, 0.01
"""Seconds between two questions to SQLite: shortly after a change, and when nothing happens."""
IN_VAIN = Backoff(0.002, cap=0.1)
"""Before the next look, after so many changes that brought no message."""
POLL = Backoff(0.02, cap=0.5)
"""Between two looks at a PostgreSQL that sends no notifications."""
ECHO = 2.0
"""Seconds within which a notification of our own must arrive. Behind a pooler in transaction mode, none does."""
AGAIN = Backoff(1.0, cap=60.0)
"""Between two attempts to listen."""


class RelayBell:
    """Ends the wait of a relay. Rung from any thread."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self.ring = self._rung.set

    def clear(self) -> None:
        self._rung.clear()

    def wait(self, seconds: float) -> bool:
        """Wait until it rings, at most so long, or until the engine is stopped. Return whether it rang."""
        stop = engine_stop()
        if stop is None:
            return self._wait(seconds)
        with stop.calling(self.ring):
            return True if stop.requested else self._wait(seconds)

    def _wait(self, seconds: float) -> bool:
        return self._rung.wait(seconds)

    def answer(self, *, found: bool) -> None:
        """Note whether there was something to do when it last rang."""

    def start(self) -> None:
        """Begin to listen."""

    def close(self) -> None:
        """Stop listening."""


class FileBell(RelayBell):
    """Rings when another connection commits to a SQLite database, whichever process it belongs to.

    It asks SQLite for the number that changes with every such commit. The time of a file says less: two commits within
    a tick of the clock have the same.
    """

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._seen: int | None = None
        self._changed_at = time.monotonic()
        self._in_vain = 0

    def answer(self, *, found: bool) -> None:
        self._in_vain = 0 if found else self._in_vain + 1

    def start(self) -> None:
        if self._connection is None and self._path is not None and os.path.exists(self._path):
            self._connection = sqlite3.connect(
                self._path, timeout=0.0, isolation_level=None, check_same_thread=False
            )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._path = None

    def clear(self) -> None:
        super().clear()
        self._seen = self._version()

    def _wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        # A file that others change all the time says little: then the relay looks less often.
        if super()._wait(min(IN_VAIN.delay(self._in_vain), seconds)):
            return True
        while (left := until - time.monotonic()) > 0:
            if self._version() != self._seen:
                self._changed_at = time.monotonic()
                return True
            recent = time.monotonic() - self._changed_at < 1.0
            if super()._wait(min(left, QUICK if recent else SLOW)):
                return True
        self._in_vain = 0
        return False

    def _version(self) -> int | None:
        if self._connection is None:
            return None
        try:
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error:  # someone commits right now
            return None


class NotifiedBell(RelayBell):
    """Rings at a notification of PostgreSQL. Without them it rings by itself now and then, and says so once."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._closed = False
        self._idle = 0
        self._thread: threading.Thread | None = None
        self.listening = False
        """Whether notifications are known to arrive."""
        self._said = False

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="onceward-outbox-listen")
            self._thread.start()

    def close(self) -> None:
        self._closed = True

    def _wait(self, seconds: float) -> bool:
        if self.listening:
            self._idle = 0
            return super()._wait(seconds)
        pause = POLL.delay(self._idle)
        if super()._wait(min(seconds, pause)):
            self._idle = 0
            return True
        self._idle += 1
        return pause < seconds

    def _run(self) -> None:
        attempt = 0
        while not self._closed:
            began = time.monotonic()
            try:
                self._listen()
            except Exception as error:  # noqa: BLE001  whatever it is, the relay polls
                self._say(driver_message(error))
            self.listening = False
            self.ring()
            attempt = 0 if time.monotonic() - began > AGAIN.cap else attempt + 1
            until = time.monotonic() + AGAIN.delay(attempt)
            while not self._closed and time.monotonic() < until:
                time.sleep(0.2)

    def _listen(self) -> None:
        """Ring at every notification, until the connection breaks or this is closed."""
        connection = connect(self._engine)
        try:
            connection.execute(f"LISTEN {CHANNEL}")
            # Sent from another connection: a pooler may give this one another session with every transaction.
            with self._engine.connect() as other:
                other.exec_driver_sql(f"NOTIFY {CHANNEL}")
                other.commit()
            heard = time.monotonic()
            while not self._closed:
                for _ in connection.notifies(timeout=0.5, stop_after=1):
                    self.listening = True
                    self.ring()
                if not self.listening and time.monotonic() - heard > ECHO:
                    self._say("no notification arrives, as behind PgBouncer in transaction mode")
                    return
        finally:
            connection.close()

    def _say(self, why: str) -> None:
        if not self._said and not self._closed:
            self._said = True
            _log.warning(
                "the relay cannot listen to PostgreSQL and looks for new messages by itself: %s", why
            )


def bell_of(engine: Engine) -> RelayBell:
    if engine.dialect.name == "postgresql":
        return NotifiedBell(engine)
    return FileBell(
        None if engine.url.database in (None, "", ":memory:") else os.path.abspath(str(engine.url.database))
    )


def connect(engine: Engine) -> Any:
    """Return a connection of psycopg in autocommit mode, which no pool has."""
    pooled = engine.raw_connection()
    driver: Any = pooled.driver_connection
    pooled.detach()
    driver.rollback()
    driver.autocommit = True
    return driver
