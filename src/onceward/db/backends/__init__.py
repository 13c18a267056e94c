"""What a session needs to know about a database."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from onceward.db.backends.postgresql import PostgreSql
from onceward.db.backends.sqlite import Sqlite
from onceward.errors import ConfigurationError


class Backend(Protocol):
    def begin(self, connection: Connection) -> None:
        """Begin a real transaction: reads and savepoints are inside it from the first statement on."""

    def has_ended(self, connection: Connection) -> bool:
        """Whether the database has rolled the transaction back by itself. Asked after a failed statement."""

    def will_not_commit(self, connection: Connection) -> bool:
        """Whether a commit would silently be a rollback. Asked before a commit that follows a failed statement."""

    def is_duplicate(self, error: DBAPIError) -> bool:
        """Whether a uniqueness constraint was violated. Decided by the error's code."""

    def is_serialization_failure(self, error: DBAPIError) -> bool:
        """Whether the transaction only had bad luck with its neighbours: the same again may well succeed."""

    def is_unavailable(self, error: DBAPIError) -> bool:
        """Whether the database can do this for nobody now: it is away, read-only or out of room. Decided by the error's
        code."""

    def has_written(self, connection: Connection) -> bool:
        """Whether the transaction has changed anything so far."""

    def is_lock_timeout(self, error: DBAPIError) -> bool:
        """Whether a lock was not free in time. Decided by the error's code."""

    def lock_timeout(self, connection: Connection, seconds: float) -> AbstractContextManager[None]:
        """Within the block nothing waits longer for a lock. An error in it leaves the transaction usable."""

    def take_advisory_lock(self, connection: Connection, key: int) -> None:
        """Take the lock, and keep it until the transaction has ended."""


BACKENDS: dict[str, Backend] = {"sqlite": Sqlite(), "postgresql": PostgreSql()}
"""By SQLAlchemy's name of the dialect, one file each."""


def backend_of(dialect: Dialect) -> Backend:
    backend = BACKENDS.get(dialect.name)
    if backend is None:
        raise ConfigurationError(
            f"a session works on {' and '.join(BACKENDS)}, not on {dialect.name!r}; give it an engine of one of these"
        )
    return backend
