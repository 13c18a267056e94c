"""A guest of a session's transaction, and the kinds of parameters that get one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar

from onceward.db import operations
from onceward.db.errors import SessionError
from onceward.db.guests.reads import OpenReads
from onceward.db.statement import ENDS_ITSELF, refusal

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from onceward.db.guests.connection import LentConnection
    from onceward.db.transaction import DbTransaction

T = TypeVar("T")

ENDED = (
    "{what} has ended with its handler, and its transaction with it; load what you need before the handler returns, "
    "and keep plain values instead of the session or its objects"
)
_NOT_THE_USER = ("sqlalchemy.", "onceward.", "contextlib", "psycopg.", "greenlet")


class Kind(NamedTuple):
    """What a parameter's annotation asks for."""

    name: str
    """As in the annotation."""
    family: str
    """`orm`, `sqlite3` or `psycopg`."""
    asynchronous: bool
    cls: Any
    """The annotated class."""

    def open(self, session: Any) -> Guest:
        """Make the guest of a session; its `given` is the handler's argument."""
        if self.family == "orm":
            from onceward.db.guests.orm import OrmGuest

            return OrmGuest(session, self)
        from onceward.db.guests.drivers import DriverGuest

        return DriverGuest(session, self)


def kind_of(hint: Any) -> Kind | None:
    """The kind of guest that an annotation asks for. Looks only at what is imported already: nothing else can be in an
    annotation."""
    if not isinstance(hint, type):
        return None
    for module, name, family, asynchronous in _KINDS:
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and issubclass(hint, known):
            return Kind(
                f"{module}.{name}" if hint is known else hint.__qualname__, family, asynchronous, hint
            )
    return None


_KINDS = (
    ("sqlalchemy.orm", "Session", "orm", False),
    ("sqlalchemy.ext.asyncio", "AsyncSession", "orm", True),
    ("sqlite3", "Connection", "sqlite3", False),
    ("psycopg", "Connection", "psycopg", False),
    ("psycopg", "AsyncConnection", "psycopg", True),
)


class Lending:
    """The guests of one call of a handler, one of each family."""

    def __init__(self, kinds: Mapping[str, Kind], session: Any) -> None:
        self._guests: dict[str, Guest] = {name: kind.open(session) for name, kind in kinds.items()}
        session.guests = tuple(self._guests.values())
        self.given = {name: guest.given for name, guest in self._guests.items()}
        """What to pass on, by family."""

    def __enter__(self) -> Self:
        for guest in self._guests.values():
            guest.enter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failed = True
        try:
            if error is None:
                for guest in self._guests.values():
                    guest.finish()
                failed = False
        finally:
            self._end(failed=failed)

    async def __aenter__(self) -> Self:
        from sqlalchemy.util import greenlet_spawn

        return await greenlet_spawn(self.__enter__)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from sqlalchemy.util import greenlet_spawn

        await greenlet_spawn(self.__exit__, kind, error, trace)

    def _end(self, *, failed: bool) -> None:
        for guest in self._guests.values():
            guest.ended = True
        for guest in self._guests.values():
            if failed:
                guest.undo()
            guest.reads.close()


class Guest:
    """Code that uses the transaction of a session, but cannot end it."""

    given: Any

    def __init__(self, session: Any, kind: Kind) -> None:
        self.session = session
        self.kind = kind
        self.ended = False
        """Whether the handler has returned or raised."""
        self._inside = False
        """Whether an operation of the session is running, for this guest."""
        self._misuse: SessionError | None = None
        self._lent: LentConnection | None = None
        self.reads = OpenReads()

    def run(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation of the session. Under asyncio, the caller runs in a greenlet of SQLAlchemy."""
        if self.ended:
            raise SessionError(ENDED.format(what=f"this {self.kind.name}"))
        called: Any = self.session.run(operation, *args)
        if not self.kind.asynchronous:
            return called  # type: ignore[no-any-return]
        from sqlalchemy.util import await_only

        return await_only(called)  # type: ignore[no-any-return]

    def statement(self, sql: Any, call: Callable[[], T]) -> T:
        """Run a statement. What it runs on its way, such as a default, belongs to it."""
        return call() if self._inside else self.run(operations.statement, sql, lambda: self._in_session(call))

    def _in_session(self, call: Callable[[], T]) -> T:
        self._inside = True
        try:
            return call()
        finally:
            self._inside = False

    def connection(self) -> LentConnection:
        """The connection to use now. A session that opens its transaction late opens it here."""
        from onceward.db.guests.connection import LentConnection

        real: Connection = self.run(_connection_of)
        if self._lent is None or self._lent.real is not real:
            self._lent = LentConnection(real, self)
        return self._lent

    def lend(self) -> None:
        """The user gets the driver's connection."""
        if not self._inside:
            self.run(_lend)

    def refuse(self, what: str, instead: str) -> NoReturn:
        """Refuse what would end the transaction. The handler has failed, even if it catches this."""
        error = SessionError(f"{what} {_line()}: {instead}")
        self._misuse = self._misuse or error
        raise error

    def check_text(self, text: str, database: str) -> None:
        """Refuse a statement that would end the transaction, or more than one."""
        why = refusal(text, database)
        if why == ENDS_ITSELF:
            self.refuse("SQL", why)
        if why is not None:
            raise SessionError(why)

    @property
    def has_changes(self) -> bool:
        """Whether it has changes that the database has not seen yet."""
        return False

    def enter(self) -> None:
        """The handler is about to be called."""

    def let_go(self) -> None:
        """The transaction ends here, with nothing written, and another begins later. Called in an operation."""
        self._in_session(self.end_reads)
        self.reads.close()
        self._lent = None

    def end_reads(self) -> None:
        """Forget what was read."""

    def finish(self) -> None:
        """The handler has returned. Raises if the transaction must not be committed."""
        if self._misuse is not None:
            raise self._misuse
        self.flush()
        if self._lent is not None:
            self._release(self._lent)

    def flush(self) -> None:
        """Write what the database has not seen yet."""

    def keep(self) -> None:
        """The transaction has committed."""

    def undo(self) -> None:
        """Forget what it did, without a call to the database: the inbox rolls back."""

    def _decided(self, committed: bool) -> None:
        if committed:
            self.keep()
        else:
            self.undo()

    def _release(self, lent: LentConnection) -> None:
        """End the savepoints. That fails, and nothing is committed, if the transaction they began in has ended."""
        while (nested := lent.get_nested_transaction()) is not None:
            nested.commit()
        self.reads.close()
        self.run(self._check)

    def _check(self, transaction: DbTransaction) -> None:
        operations.check_open(transaction)
        transaction.at_end += (self._decided,)


def _connection_of(transaction: Any) -> Connection:
    connection: Connection = transaction.connection
    return connection


def _lend(transaction: Any) -> None:
    transaction.lend()


def _line() -> str:
    """`in shop.py:12`: the line of the user's code that is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_NOT_THE_USER):
            return f"in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "in a handler"
