"""What a session needs to know about a database."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from onceward.db.backends.postgresql import PostgreSql
from onceward.db.backends.sqlite import Sqlite
from onceward.errors import ConfigurationError


class Backend(Protocol):
    cancels_late: bool
    """Whether a cancel may reach a statement after the one it was meant for."""

    def begin(self, connection: Connection, *, only_reads: bool = False) -> None:
        """Begin a real transaction that includes reads and savepoints from the first statement on. One that only reads
        need not wait for who is writing."""

    def check_files(self, connection: Connection) -> None:
        """Raise `FileLostError` if the files that this connection has open were deleted or replaced. Called after a
        commit, which has then been written to nowhere."""

    def check_database(self, engine: Engine) -> None:
        """The same for the database that the sessions of this engine have found so far. Called before there is a
        connection, which would create another."""

    def has_ended(self, connection: Connection) -> bool:
        """Whether the database has rolled the transaction back on its own. Asked after a failed statement."""

    def is_idle(self, connection: Connection) -> bool:
        """Whether the driver knows of no transaction. Asked after a statement has run in it, without a call to the
        database."""

    def lend(self, connection: Connection) -> Any:
        """Return what tells this transaction from later ones of its connection. Called before code of others gets the
        connection. None if that has to wait: the transaction has failed."""

    def check_lent(self, connection: Connection, mark: Any) -> None:
        """Raise unless the transaction is still the one whose `lend` returned the mark, and can commit. Called before
        its commit."""

    def will_not_commit(self, connection: Connection) -> bool:
        """Whether a commit would silently be a rollback. Asked before a commit that follows a failed statement."""

    def is_duplicate(self, error: DBAPIError) -> bool:
        """Whether a uniqueness constraint was violated. Decided by the error's code."""

    def is_serialization_failure(self, error: BaseException) -> bool:
        """Whether the transaction only collided with concurrent ones, so a retry may succeed."""

    def is_unavailable(self, error: DBAPIError) -> bool:
        """Whether the database is down, read-only or out of space. Decided by the error's code."""

    def has_written(self, connection: Connection) -> bool:
        """Whether the transaction has changed anything so far."""

    def is_lock_timeout(self, error: DBAPIError) -> bool:
        """Whether a lock was not released in time. Decided by the error's code."""

    def lock_timeout(self, connection: Connection, seconds: float) -> AbstractContextManager[None]:
        """Limit every wait for a lock inside the block. An error inside it leaves the transaction usable."""

    def cancel(self, driver: Any) -> None:
        """Cancel the statement that runs on this driver connection. Called from another thread."""

    def part_words(self, number: int) -> Sequence[str]:
        """The statements that begin what can be undone alone. Parts of a transaction are numbered from 1, and come one
        after another."""

    def begin_part(self, connection: Connection, number: int) -> None:
        """Run these statements, and nothing with them."""

    def end_part(self, runner: Any) -> None:
        """Keep the part, without a call to the database. Raises if it is known that the transaction has ended."""

    def note_repeated(self, connection: Connection, *, repeated: bool) -> None:
        """The open transaction is made again, or no longer, after a serialization failure."""

    def undo_part(self, connection: Connection, number: int) -> None:
        """Undo the part, and nothing before it."""

    def check_parts(self, connection: Connection, last: int) -> None:
        """Raise unless the transaction is the one in which its last part began. Called before its commit."""

    def runner(self, connection: Connection) -> Any:
        """What `direct` needs of the connection for a whole transaction: finding it takes longer than a short
        statement. None if only SQLAlchemy can run statements here."""

    def direct(
        self, connection: Connection, runner: Any, sql: str, values: Any, before: Sequence[str] = ()
    ) -> tuple[int, Any] | None:
        """Run a statement on the driver, after those of `before` and together with them, and return the rows affected
        and its first row. None if nothing was run, because only SQLAlchemy can run it here."""

    async def direct_async(
        self, connection: Connection, runner: Any, sql: str, values: Any, before: Sequence[str] = ()
    ) -> tuple[int, Any] | None:
        """The same in asyncio, outside a greenlet."""

    def take_advisory_lock(self, connection: Connection, key: int) -> None:
        """Take the lock and keep it until the transaction ends."""


BACKENDS: dict[str, Backend] = {"sqlite": Sqlite(), "postgresql": PostgreSql()}
"""By SQLAlchemy's dialect name; one file each."""


def backend_of(dialect: Dialect) -> Backend:
    backend = BACKENDS.get(dialect.name)
    if backend is None:
        raise ConfigurationError(
            f"a session works on {' and '.join(BACKENDS)}, not on {dialect.name!r}; use an engine for one of these"
        )
    return backend
