"""Notifications of PostgreSQL, on a connection that no pool has.

Nothing depends on them: a waiting process also polls from time to time. Behind a pooler in transaction mode none
arrive, so a test that another connection sends must, before they are relied on; without them, a wait is a short
pause.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from contextlib import closing

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from onceward._process.readiness import Doorbell, wait_readable, wait_readable_async
from onceward._process.stop import is_stopped
from onceward._text import driver_message
from onceward.backoff import Backoff
from onceward.db.detached_connection import DetachedConnection, open_detached
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.db"))

POLL = Backoff(0.02, cap=0.5)
"""Between two looks where notifications do not arrive."""
ECHO = 2.0
"""Seconds within which the test must arrive."""
HEARING_TEST = 300.0
"""Seconds until listening is tried again where notifications do not arrive."""
TRY_AGAIN = Backoff(1.0, cap=HEARING_TEST)
"""Until it is tried again after an error: the server may only have been away, or have had no room."""


class ListenLine:
    """Waits for the notifications of one channel: `begin`, which may block as connecting does, then `wait`.

    One thread or task waits at a time; for others a wait is a short pause. `who` listens, for the log. `presence` is an
    advisory lock that is shared while somebody listens, so senders can know.
    """

    def __init__(
        self, engine: Engine, channel: str, who: str, presence: tuple[int, str] | None = None
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._who = who
        self._presence = presence
        self._errors = (SQLAlchemyError, engine.dialect.loaded_dbapi.Error, OSError, AttributeError)
        self._socket = DetachedConnection()
        weakref.finalize(self, self._socket.close)  # also if nobody closes this
        self._hears = self._is_present = False
        self._connected_at = self._deaf_until = 0.0
        self._idle = self._errors_in_turn = 0
        self._has_said_so = False
        self._closed = False
        self._end = Doorbell()
        self._using = threading.Lock()
        self._waiting = threading.Lock()

    @property
    def hears(self) -> bool:
        """Whether notifications are known to arrive."""
        return self._hears and self._socket.driver is not None

    def begin(self) -> bool:
        """Listen, unless it does. Return True if there may be news since the caller looked, so it should look again
        before it waits."""
        if not self._using.acquire(blocking=False):
            return False  # another thread is at it
        try:
            return self._begin()
        except self._errors as error:
            self._go_deaf(driver_message(error), TRY_AGAIN.delay(self._errors_in_turn))
            self._errors_in_turn += 1
            return False
        finally:
            self._using.release()

    def _begin(self) -> bool:
        self._socket.leave_to_parent()
        if self._closed or time.monotonic() < self._deaf_until:
            return False
        if self._socket.driver is None:
            self._connect()
            return True
        if self._presence is None or self._is_present or not self._hears:
            return False
        # Not before it is known that this connection is one to the server: a pooler would leave the lock behind.
        self._socket.driver.execute("SELECT pg_advisory_lock_shared(%s, hashtext(%s))", self._presence)
        self._is_present = True
        return True

    def step_aside(self) -> None:
        """Have senders not notify until the next `begin`: there is work, and no wait."""
        if self._is_present and self._using.acquire(blocking=False):
            try:
                self._socket.driver.execute(
                    "SELECT pg_advisory_unlock_shared(%s, hashtext(%s))", self._presence
                )
            except self._errors as error:
                self._hang_up(error)
            finally:
                self._is_present = False
                self._using.release()

    def looked(self, found: bool) -> None:
        """If there was work, look again soon, also without notifications."""
        if found:
            self._idle = 0

    def wait(self, seconds: float, *doors: int) -> bool:
        """Return True if a notification came, or one of the files `doors` can be read, or it is time to look; False
        after `seconds`, or when the engine's call is stopped."""
        if not self._waiting.acquire(blocking=False):
            return self._is_time(wait_readable([*doors], self._pause(seconds)))
        try:
            if self._heard():
                return True
            fd, limit = self._limits(seconds)
            ready = wait_readable([*fd, self._end.fd(), *doors], limit)
            return self._heard() or ready or (limit < seconds and self._is_time(False))
        finally:
            self._waiting.release()

    async def wait_async(self, seconds: float) -> bool:
        """As `wait`, in a task."""
        if not self._waiting.acquire(blocking=False):
            return self._is_time(await wait_readable_async([], self._pause(seconds)))
        try:
            if self._heard():
                return True
            fd, limit = self._limits(seconds)
            ready = await wait_readable_async([*fd, self._end.fd()], limit)
            return self._heard() or ready or (limit < seconds and self._is_time(False))
        finally:
            self._waiting.release()

    def close(self) -> None:
        """End the wait, and the connection. Idempotent."""
        self._closed = True
        self._end.ring()
        with self._using:
            self._socket.leave_to_parent()
            self._socket.close()

    def _limits(self, seconds: float) -> tuple[list[int], float]:
        """The file to wait for, and how long."""
        driver = self._socket.driver
        if self._closed:
            return [], 0.0
        if driver is None:
            return [], self._pause(seconds)
        return [driver.fileno()], seconds if self._hears else min(seconds, POLL.first)

    def _pause(self, seconds: float) -> float:
        return min(seconds, POLL.delay(self._idle))

    def _is_time(self, ready: bool) -> bool:
        self._idle += 1
        return ready or not is_stopped()

    def _heard(self) -> bool:
        """Take the notifications that have arrived. Return whether there were any."""
        with self._using:
            driver = self._socket.driver
            if driver is None or self._closed:
                return False
            try:
                heard = bool(list(driver.notifies(timeout=0)))
            except self._errors as error:
                self._hang_up(error)
                return True
            if heard:
                self._hears, self._errors_in_turn = True, 0
            if not self._hears and time.monotonic() - self._connected_at > ECHO:
                self._go_deaf("no notification arrives, as behind PgBouncer in transaction mode")
            return heard

    def _connect(self) -> None:
        self._hears = self._is_present = False
        self._socket.open(self._engine)
        self._socket.driver.execute(f"LISTEN {self._channel}")
        self._connected_at = time.monotonic()
        # From another connection: behind a pooler that lends one for each transaction, this does not arrive. That one
        # does not go back to the pool: the engine may have been disposed meanwhile.
        with closing(open_detached(self._engine)) as other:
            other.execute(f"NOTIFY {self._channel}")

    def _hang_up(self, error: BaseException) -> None:
        """The connection is lost. The caller looks, which fails if the server is away."""
        self._socket.close()
        self._hears = self._is_present = False
        self._deaf_until = time.monotonic() + 1.0
        _log.info("%s: the connection that listens was lost: %s", self._who, driver_message(error))

    def _go_deaf(self, why: str, seconds: float = HEARING_TEST) -> None:
        self._socket.close()
        self._hears = self._is_present = False
        self._deaf_until = time.monotonic() + seconds
        if not self._has_said_so and not self._closed:
            self._has_said_so = True
            _log.warning(
                "%s: LISTEN does not work here, so new messages are found by polling, every %g to %g s (%s); behind "
                "PgBouncer, use a URL to the server itself or to a pool in session mode",
                self._who, POLL.first, POLL.cap, why,
            )  # fmt: skip
