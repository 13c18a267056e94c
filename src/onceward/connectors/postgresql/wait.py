"""How a connector waits for messages: it listens on a connection of its own, and looks again now and then regardless.

Senders notify only while somebody waits: see `onceward_queue_append`. One that looked just before the wait began does
not, so the first look again comes soon.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

from psycopg import Error
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from onceward._process.forks import forks
from onceward._text import driver_message
from onceward.connectors.postgresql.schema import WAITING
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.connectors.postgresql"))

LONGEST = 0.9
"""Seconds that a fetch waits: it may take one second."""
SOON = 0.05
"""Seconds until the first look again."""
POLL = 0.1
"""Seconds between looks where notifications do not arrive."""
HEARING_TEST = 300.0
"""Seconds until listening is tried again after it did not work."""


class NotifiedLine:
    """Waits for the messages of one queue. One thread waits at a time."""

    def __init__(self, engine: Engine, queue: str) -> None:
        self._engine = engine
        self._queue = queue
        self._driver: Any = None
        self._generation = forks.generation
        self._hears = False
        """Whether a notification has arrived on this connection."""
        self._deaf_until = 0.0
        self._has_said_so = False
        self._pipe: tuple[int, int, int] | None = None
        """Its process and both ends: `end` writes to it."""
        self._ended = False
        self._waits = threading.Lock()

    def moments(self, next_due: float | None) -> Generator[None]:
        """Yield whenever it is worth looking for messages, until the wait is over. `next_due` is when one comes that
        waits for its time, in seconds. If another thread waits already, this one does not."""
        if not self._waits.acquire(blocking=False):
            return
        try:
            yield from self._moments(next_due)
        except (Error, OSError) as error:
            self._hang_up()
            _log.warning("the connection that waits for messages was lost: %s", driver_message(error))
        finally:
            self._ended = False
            self._waits.release()

    def _moments(self, next_due: float | None) -> Iterator[None]:
        until = time.monotonic() + LONGEST
        due = until if next_due is None else min(time.monotonic() + max(next_due, 0.0), until)
        listening = self._listen()
        pause = SOON
        with ExitStack() as present:
            is_present = False
            while (now := time.monotonic()) < until:
                if listening and self._hears and not is_present:
                    present.enter_context(self._present())
                    is_present, pause = True, SOON
                    yield  # a message may have come before senders could know
                    continue
                ends = min(now + (pause if listening else min(pause, POLL)), due if now < due else until)
                if self._wait(max(ends - now, 0.001), listening):
                    return
                pause = LONGEST
                yield
        if listening and not self._hears:
            self._go_deaf("the server did not deliver a notification within a second")

    def end(self) -> None:
        """End the wait, or the next one. Safe in signal handlers and from other threads."""
        self._ended = True
        pipe = self._pipe
        if pipe is not None and pipe[0] == os.getpid():
            with suppress(BlockingIOError):
                os.write(pipe[2], b".")

    def close(self) -> None:
        self.end()
        with self._waits:
            self._hang_up()

    def _wait(self, seconds: float, listening: bool) -> bool:
        """Wait that long, or until a message may be there. Return whether `end` was called."""
        read = self._pipe_end()
        if self._was_ended():
            return True
        if listening and self._heard():
            return False  # it came with the answer to another statement
        poll = select.poll()
        poll.register(read, select.POLLIN)
        if listening:
            poll.register(self._driver.fileno(), select.POLLIN)
        ready = {fd for fd, _ in poll.poll(seconds * 1000)}
        if read in ready:
            os.read(read, 4096)
        if self._was_ended():
            return True
        if ready - {read}:
            self._heard()
        return False

    def _heard(self) -> bool:
        """Whether notifications have arrived."""
        heard = len(list(self._driver.notifies(timeout=0))) > 0
        self._hears = self._hears or heard
        return heard

    def _was_ended(self) -> bool:
        return self._ended

    def _pipe_end(self) -> int:
        if self._pipe is None or self._pipe[0] != os.getpid():
            read, write = os.pipe()
            os.set_blocking(write, False)
            weakref.finalize(self, _close_both, read, write)
            self._pipe = os.getpid(), read, write
        return self._pipe[1]

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Have senders notify inside the block. Not before it is known that this connection is one to the server: a
        pooler would leave the lock behind."""
        lock = (WAITING, self._queue)
        self._driver.execute("SELECT pg_advisory_lock_shared(%s, hashtext(%s))", lock)
        try:
            yield
        finally:
            with suppress(Error):  # the lock ends with the connection
                self._driver.execute("SELECT pg_advisory_unlock_shared(%s, hashtext(%s))", lock)

    def _listen(self) -> bool:
        """Whether notifications arrive, as far as is known."""
        if self._generation != forks.generation:
            self._generation, self._driver, self._pipe = forks.generation, None, None
        if time.monotonic() < self._deaf_until:
            return False
        if self._driver is not None and not self._driver.closed:
            return True
        try:
            self._connect()
        except (SQLAlchemyError, Error) as error:
            self._go_deaf(driver_message(error))
            return False
        return True

    def _connect(self) -> None:
        lent = self._engine.raw_connection()
        driver: Any = lent.driver_connection
        lent.detach()  # it is not given back to the pool
        try:
            driver.rollback()
            driver.autocommit = True
            channel = driver.execute("SELECT 'onceward_queue_' || md5(%s)", (self._queue,)).fetchone()[0]
            driver.execute(f"LISTEN {channel}")
        except BaseException:
            driver.close()
            raise
        self._driver, self._hears = driver, False
        # From another connection: behind a pooler that lends one for each transaction, this does not arrive.
        with closing(self._engine.connect()) as other, other.begin():
            other.exec_driver_sql("SELECT pg_notify(%s, 'test')", (channel,))

    def _go_deaf(self, why: str) -> None:
        self._hang_up()
        self._deaf_until = time.monotonic() + HEARING_TEST
        if not self._has_said_so:
            self._has_said_so = True
            _log.warning(
                "queue %s: LISTEN does not work here, so new messages are found by polling every %g s (%s); behind "
                "PgBouncer, give the source a URL to the server itself or to a pool in session mode",
                self._queue, POLL, why,
            )  # fmt: skip

    def _hang_up(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None and self._generation == forks.generation:
            driver.close()


def _close_both(read: int, write: int) -> None:
    os.close(read)
    os.close(write)
