"""Whether the database is available. Down, read-only, out of space and deleted all count as unavailable.

    AVAILABLE ──fails──► UNAVAILABLE ──accepts a write──► ON_TRIAL ──an event is done──► AVAILABLE
                              ▲                               └──fails──► FAILED_TRIAL
                              └────────── reported ──────────────────────────┘

A full disk still accepts writes that need no space. So a database that fails again after accepting a test write is
reported as unavailable once more before it is tested again.
"""

from __future__ import annotations

from enum import Enum, auto

from sqlalchemy.exc import DBAPIError

from onceward._text import driver_message
from onceward.db import LockTimeoutError
from onceward.db.backends import backend_of
from onceward.errors import FileLostError
from onceward.inbox.errors import DatabaseUnavailableError
from onceward.inbox.ports import InboxPorts
from onceward.inbox.stores.base import Store


class AvailabilityState(Enum):
    AVAILABLE = auto()
    UNAVAILABLE = auto()
    """At the last check."""
    ON_TRIAL = auto()
    """It accepted a test write after that; no event has been done since."""
    FAILED_TRIAL = auto()
    """It failed again while on trial."""


class Availability:
    """What one inbox knows about its database."""

    def __init__(self, store: Store, ports: InboxPorts) -> None:
        self._store = store
        self._ports = ports
        self._backend = backend_of(ports.dialect)
        self._state = AvailabilityState.AVAILABLE

    def is_to_blame(self, error: BaseException) -> bool:
        """Whether the error means that the database is unavailable. Remembers it if so."""
        found = isinstance(error, FileLostError) or (
            isinstance(error, DBAPIError) and self._backend.is_unavailable(error)
        )
        if found and self._state is AvailabilityState.ON_TRIAL:
            self._state = AvailabilityState.FAILED_TRIAL
        elif found and self._state is AvailabilityState.AVAILABLE:
            self._state = AvailabilityState.UNAVAILABLE
        return found

    def event_done(self) -> None:
        if self._state is AvailabilityState.ON_TRIAL:
            self._state = AvailabilityState.AVAILABLE

    @property
    def in_doubt(self) -> bool:
        """Whether it was unavailable at the last check, or its file is lost."""
        try:
            self._ports.check_database()
        except FileLostError as error:
            self.is_to_blame(error)
        return self._state in (AvailabilityState.UNAVAILABLE, AvailabilityState.FAILED_TRIAL)

    async def check(self, consumer_id: str) -> None:
        """Raise `DatabaseUnavailableError` if the database is still unavailable. Call it while in doubt."""
        problem = f"the database of consumer {consumer_id!r} is not available"
        if self._state is AvailabilityState.FAILED_TRIAL:
            self._state = AvailabilityState.UNAVAILABLE
            raise DatabaseUnavailableError(f"{problem}: it accepted a test write, but not an event's")
        try:
            await self._ports.transact(self._store.touch, consumer_id)
        except LockTimeoutError:
            return  # available: another transaction holds the lock
        except FileLostError as error:
            raise DatabaseUnavailableError(f"{problem}: {error}") from error
        except DBAPIError as error:
            if not self._backend.is_unavailable(error):
                raise
            raise DatabaseUnavailableError(f"{problem}: {driver_message(error)}") from error
        self._state = AvailabilityState.ON_TRIAL
