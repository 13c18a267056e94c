"""Leaving a connection clean without hiding the error that made it necessary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from threading import Lock
from typing import Concatenate, NoReturn, ParamSpec, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import Pool, StaticPool

from onceward.db.backends import BACKENDS, backend_of
from onceward.db.errors import LockTimeoutError, SessionError

_log = logging.getLogger(__name__)


def roll_back(connection: Connection, cause: BaseException, *, after_commit: bool = False) -> None:
    """Roll back because of `cause`, which stays the error that is seen.

    `after_commit`: a commit has failed. SQLAlchemy then regards the transaction as over, the database need not.
    """
    try:
        connection.rollback()
        if after_commit and not connection.invalidated:
            connection.connection.rollback()
    except BaseException as failure:
        _throw_away(connection)
        if not isinstance(failure, Exception):
            raise
        cause.add_note(f"The rollback failed, too, and the connection was thrown away: {failure}")
        _log.warning("a rollback failed; throwing the connection away ends its transaction", exc_info=True)


def give_back(connection: Connection) -> None:
    """To its pool. The transaction has ended by now, and its outcome says more than a failure here."""
    try:
        connection.close()
    except Exception:  # noqa: BLE001
        _log.warning("a connection could not be given back to its pool", exc_info=True)


def _throw_away(connection: Connection) -> None:
    try:
        connection.invalidate()
    except Exception:  # noqa: BLE001
        _log.warning("a broken connection could not be closed", exc_info=True)


# Engines with one connection for everybody, as StaticPool gives to in-memory databases.
#
# Two sessions on it would be one transaction, and the first to end would end both. The second is refused before it
# touches the connection: even giving it back would roll the first one back.


_lock = Lock()
_in_use: WeakSet[Pool] = WeakSet()


def reserve(pool: StaticPool) -> Pool:
    """The pool, to `free` at the end."""
    with _lock:
        if pool in _in_use:
            raise SessionError(
                "this engine has one connection for all (StaticPool), and another session is using it; "
                "end that one first, or use a database file"
            )
        _in_use.add(pool)
    return pool


def free(pool: Pool) -> None:
    with _lock:
        _in_use.discard(pool)


@contextmanager
def reserved(engine: Engine) -> Iterator[None]:
    """For the block, if this is such an engine."""
    if not isinstance(engine.pool, StaticPool):
        yield
        return
    pool = reserve(engine.pool)
    try:
        yield
    finally:
        free(pool)


# Begin once, end once: the life of a session's transaction, for both kinds of session.
#
#     NEW ──opening──► OPEN ──end──► ENDED        a session that could not be opened has ended, too
#                       │              ▲
#                       └─► LOST ──────┘          nothing but a rollback is possible any more
#
# Everything here is written for a plain SQLAlchemy connection. Under asyncio SQLAlchemy runs it in a greenlet.


P = ParamSpec("P")
T = TypeVar("T")


class State(Enum):
    NEW = auto()
    OPEN = auto()
    LOST = auto()
    ENDED = auto()


_NESTED = "this session is open already and cannot be nested; a second transaction needs a second {name}"
CANNOT_ENTER = {
    State.OPEN: _NESTED,
    State.LOST: _NESTED,
    State.ENDED: "this session has ended and cannot be used again: it is one transaction; make a new {name}",
}
CANNOT_USE = {
    State.NEW: "this session is not open; use it inside its block, `{block} {name}(engine) as session:`",
    State.LOST: "after the error in it this session can only be rolled back; let that error go on, "
    "and open a new {name} to try again",
    State.ENDED: "this session has ended with its block; open a new {name}",
}
CANNOT_END = {state: CANNOT_USE[state] for state in (State.NEW, State.ENDED)}


class DbTransaction:
    """One transaction. `name` is what the user knows it by: the session's class."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.backend = BACKENDS.get(engine.dialect.name) or backend_of(engine.dialect)
        self.committed = False
        self.had_conflict = False
        """Set by an optimistic update that found another version; see `optimistic.py`."""
        self._engine = engine
        self._name = name
        self._state = State.NEW
        self._connection: Connection | None = None
        self._failure: BaseException | None = None

    @property
    def connection(self) -> Connection:
        if self._state is not State.OPEN:  # asked for by every statement
            self._refuse(CANNOT_USE)
        assert self._connection is not None
        return self._connection

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around connecting and `begin`."""
        if self._state is not State.NEW:
            self._refuse(CANNOT_ENTER)
        self._state = State.ENDED
        pool = self._engine.pool
        self._shared = reserve(pool) if isinstance(pool, StaticPool) else None
        try:
            yield
        except BaseException:
            if self._shared is not None:
                free(self._shared)
            raise
        self._state = State.OPEN

    def begin(self, connection: Connection) -> None:
        self._connection = connection
        try:
            self.backend.begin(connection)
        except BaseException as error:
            roll_back(connection, error)
            give_back(connection)
            if isinstance(error, DBAPIError) and self.backend.is_lock_timeout(error):
                raise LockTimeoutError(
                    "another connection kept the database locked for longer than this engine waits "
                    "(connect_args={'timeout': seconds}); nothing was done"
                ) from error
            raise

    def run(
        self, operation: Callable[Concatenate[DbTransaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """One operation of the session. What went wrong in it is remembered: the commit must not pass over it."""
        connection = self.connection
        try:
            return operation(self, *args, **kwargs)
        except DBAPIError as error:
            self._failure = error
            if self._has_ended(connection):
                self.lose(error)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: nobody knows how far the statement came
                self.lose(error)
            raise

    def lose(self, error: BaseException) -> None:
        """Nothing but a rollback is possible from here on."""
        self._state = State.LOST
        self._failure = error

    def end(self, error: BaseException | None) -> None:
        """Commit, or roll back because of the error. The connection is given back in any case."""
        if self._state in CANNOT_END:
            self._refuse(CANNOT_END)
        connection = self._connection
        assert connection is not None
        lost, self._state = self._state is State.LOST, State.ENDED
        try:
            if error is not None:
                roll_back(connection, error)
            else:
                self._commit(connection, lost)
        finally:
            self._failure = None  # its traceback leads back here
            try:
                give_back(connection)
            finally:
                if self._shared is not None:
                    free(self._shared)

    def check_entered(self) -> None:
        if self._state in CANNOT_END:
            self._refuse(CANNOT_END)

    def _refuse(self, refusals: dict[State, str]) -> NoReturn:
        block = "async with" if self._engine.dialect.is_async else "with"
        raise SessionError(refusals[self._state].format(name=self._name, block=block))

    def _commit(self, connection: Connection, lost: bool) -> None:
        try:
            if lost or (self._failure is not None and self.backend.will_not_commit(connection)):
                raise SessionError(
                    "something failed in this session, and the database will not commit what came before it; "
                    "nothing was committed. Let the error go on instead of catching it inside the block"
                ) from self._failure
            connection.commit()
        except BaseException as failure:
            roll_back(connection, failure, after_commit=True)
            raise
        self.committed = True

    def _has_ended(self, connection: Connection) -> bool:
        return connection.invalidated or self.backend.has_ended(connection)
