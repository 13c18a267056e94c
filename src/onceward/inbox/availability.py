"""Whether the database can do anything for anybody: away, read-only and out of room are one thing here.

    AVAILABLE ──fails──► UNAVAILABLE ──takes a write──► ON_TRIAL ──an event is done──► AVAILABLE
                              ▲                             └──fails──► BROKE_ITS_WORD
                              └───────────── told ─────────────────────────┘

A disk that is full takes what needs no room. So one that fails again after it took a write is not asked the next time.
"""

from __future__ import annotations

from enum import Enum, auto

from sqlalchemy.exc import DBAPIError

from onceward._text import driver_message
from onceward.db import LockTimeoutError
from onceward.db.backends import backend_of
from onceward.inbox.errors import DatabaseUnavailableError
from onceward.inbox.ports import InboxPorts
from onceward.inbox.stores.base import Store


class State(Enum):
    AVAILABLE = auto()
    UNAVAILABLE = auto()
    """When it was last asked."""
    ON_TRIAL = auto()
    """It took a write after that, and no event has been done since."""
    BROKE_ITS_WORD = auto()
    """It was unavailable again while on trial."""


class Availability:
    """What one inbox knows of its database."""

    def __init__(self, store: Store, ports: InboxPorts) -> None:
        self._store = store
        self._ports = ports
        self._backend = backend_of(ports.dialect)
        self._state = State.AVAILABLE

    def is_to_blame(self, error: BaseException) -> bool:
        """Whether the error says that the database is unavailable; that is remembered."""
        found = isinstance(error, DBAPIError) and self._backend.is_unavailable(error)
        if found and self._state is State.ON_TRIAL:
            self._state = State.BROKE_ITS_WORD
        elif found and self._state is State.AVAILABLE:
            self._state = State.UNAVAILABLE
        return found

    def event_done(self) -> None:
        if self._state is State.ON_TRIAL:
            self._state = State.AVAILABLE

    @property
    def in_doubt(self) -> bool:
        """Whether it was unavailable when it was last asked."""
        return self._state in (State.UNAVAILABLE, State.BROKE_ITS_WORD)

    async def check(self, consumer_id: str) -> None:
        """Raises if the database is still unavailable. To be asked while it is in doubt."""
        problem = f"the database of consumer {consumer_id!r} is not available"
        if self._state is State.BROKE_ITS_WORD:
            self._state = State.UNAVAILABLE
            raise DatabaseUnavailableError(f"{problem}: it took a write, and then no event's")
        try:
            await self._ports.transact(self._store.touch, consumer_id)
        except LockTimeoutError:
            return  # it is, for somebody
        except DBAPIError as error:
            if not self._backend.is_unavailable(error):
                raise
            raise DatabaseUnavailableError(f"{problem}: {driver_message(error)}") from error
        self._state = State.ON_TRIAL
