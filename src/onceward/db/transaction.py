"""The life of a session's transaction, for both kinds of session: begin once, end once, give the connection back.

    NEW ──opening──► OPEN ──exit──► ENDED       a session that could not be opened has also ended
                      │               ▲
                      └─► LOST ───────┘         only a rollback is possible

If the attempt that opens a session runs out of time, the statement that runs in a thread is canceled, and there is no
other, and no commit. Everything here works on a plain SQLAlchemy connection; under asyncio, SQLAlchemy runs it in a
greenlet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from threading import Lock
from types import TracebackType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, Self, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.pool import Pool, StaticPool

from onceward._process.forks import forks
from onceward.db.backends import BACKENDS, backend_of
from onceward.db.errors import ENDED_WITHIN, FAILED_WITHIN, LockTimeoutError, SessionError
from onceward.db.loan import OURS, Loan
from onceward.errors import ConfigurationError
from onceward.task.cancellation import Canceller, CancelToken, current_token, raise_if_cancelled
from onceward.task.exceptions import AttemptInterrupted
from onceward.telemetry.context import current_attempt
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.redaction import redact, scrub

_log = OwnLogger(logging.getLogger("onceward.db.cleanup"))

P = ParamSpec("P")
T = TypeVar("T")

_lock = Lock()
_in_use: WeakSet[Pool] = WeakSet()
"""Pools of one shared connection (StaticPool, as in-memory databases use) that a session is using."""

_of_parents: list[Connection] = []
"""Kept, because even collecting such a connection would reset it, over the socket of the parent."""


class SessionState(Enum):
    NEW = auto()
    OPEN = auto()
    LOST = auto()
    ENDED = auto()


_NESTED = "this session is already open and cannot be nested; a second transaction needs a second {name}"
CANNOT_ENTER = {
    SessionState.OPEN: _NESTED,
    SessionState.LOST: _NESTED,
    SessionState.ENDED: "this session has ended and cannot be used again: it is one transaction; make a new {name}",
}
CANNOT_USE = {
    SessionState.NEW: "this session is not open; use it inside its block, `{block} {name}(engine) as session:`",
    SessionState.LOST: "after its error this session can only be rolled back; let the error propagate, "
    "and open a new {name} to retry",
    SessionState.ENDED: "this session has ended with its block; open a new {name}",
}
FORKED = (
    "this session belongs to the process that this one was forked from, and ends there; nothing was done with it here. "
    "Open a new session on a new engine in the child"
)
_OPEN: Final = SessionState.OPEN  # looking up a member of an enum is slow
CANNOT_END = {state: CANNOT_USE[state] for state in (SessionState.NEW, SessionState.ENDED)}


class DbTransaction:
    """One transaction, as a block in threads. `name` is the session's class, which the messages use."""

    # Class defaults: every event has a transaction of its own, or a part of one.
    committed = False
    repeated = False  # whether who opens it makes it again after a serialization failure
    only_reads = False
    """Whether it changes nothing, so on SQLite it need not wait for who is writing."""
    had_conflict = False
    """Set by an optimistic update that found another version; see `occ_update`."""
    at_end: tuple[Callable[[bool], None], ...] = ()  # called with whether it has committed
    parts = 0  # how many sessions share it; see `onceward.db.parts`
    has_begun = True  # whether `take_words` has nothing left
    token: CancelToken | None = None
    """Of the attempt that opens it, if that has a time limit. Once it is set, only a rollback is possible."""
    _canceller: Canceller | None = None
    _was_canceled = False
    _state = SessionState.NEW
    _connection: Connection | None = None
    _driver: Any = None
    _runner: Any = None
    _failure: BaseException | None = None
    _loan: Loan | None = None  # once code of others has got the connection

    def __init__(self, engine: Engine, name: str) -> None:
        self.backend = BACKENDS.get(engine.dialect.name) or backend_of(engine.dialect)
        self._engine = engine
        self._name = name
        self._generation = forks.generation

    @property
    def connection(self) -> Connection:
        return self.usable

    @property
    def usable(self) -> Connection:
        """The connection, for a statement that comes with what `take_words` returns."""
        if self._generation != forks.generation or self._state is not _OPEN:
            self.check_usable()
        return self._connection  # type: ignore[return-value]  # it has one while it is open

    @property
    def driver(self) -> Any:
        """The driver's own connection, looked up once."""
        if self._driver is None and self._connection is not None:
            self._driver = self._connection.connection.driver_connection
        return self._driver

    @property
    def runner(self) -> Any:
        """What the backend runs statements on, looked up once."""
        if self._runner is None and self._connection is not None:
            self._runner = self.backend.runner(self._connection)
        return self._runner

    def cancel(self) -> None:
        """Cancel the statement that runs. Called from another thread, while the transaction is open."""
        self.backend.cancel(self._driver)

    def take_words(self) -> Sequence[str]:
        """The statements that must come before any other, if there are some left. The caller runs them."""
        return ()

    def return_words(self, words: Sequence[str]) -> None:
        """What was taken was not run."""

    def check_usable(self) -> None:
        if self._generation != forks.generation:
            raise SessionError(FORKED)
        if self._state is not SessionState.OPEN:
            self._refuse(CANNOT_USE)

    def __enter__(self) -> Self:
        limited = current_attempt.get() is not None
        if limited:
            raise_if_cancelled()
        with self.opening():
            connection = self._engine.connect()
            self.token = current_token() if limited else None
            if self.token is not None:
                self._driver = connection.connection.driver_connection
                self._canceller = self.token.add(self.cancel)
            try:
                self.begin(connection)
            except BaseException:
                self._forget_canceller()
                raise
        return self

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Wrap connecting and `begin`."""
        if self._state is not SessionState.NEW:
            self._refuse(CANNOT_ENTER)
        self._state = SessionState.ENDED
        self.backend.check_database(self._engine)
        self._pool = pool = self._engine.pool
        self._shared = reserve(pool) if isinstance(pool, StaticPool) else None
        try:
            yield
        except BaseException:
            if self._shared is not None:
                free(self._shared)
            raise
        self._state = SessionState.OPEN

    def begin(self, connection: Connection) -> None:
        self._connection = connection
        try:
            self.backend.begin(connection, only_reads=self.only_reads)
            if self.repeated:
                self.backend.note_repeated(connection, repeated=True)
        except BaseException as error:
            roll_back(connection, error)
            self._give_back(connection)
            if isinstance(error, DBAPIError) and self.backend.is_lock_timeout(error):
                raise LockTimeoutError(
                    "another connection kept the database locked for longer than this engine waits "
                    "(connect_args={'timeout': seconds}); nothing was changed"
                ) from error
            raise

    def run(
        self, operation: Callable[Concatenate[DbTransaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run one operation of the session, and remember its failure: the commit must not ignore it."""
        # `check_running`, without its calls: this is on the way of every statement
        token = self.token
        late = token and token.expired
        if self._generation != forks.generation or self._state is not _OPEN or late or self._loan:
            self.check_running()
        try:
            if not (getattr(operation, "__module__", None) or "").startswith(OURS):
                self.lend()
            result = operation(self, *args, **kwargs)
            if self._loan:
                self._loan.check()
            return result
        except BaseException as error:
            self.note(error)
            raise

    def check_running(self) -> None:
        """Raise unless an operation may begin."""
        if self._generation != forks.generation or self._state is not _OPEN:
            self.check_usable()
        if self.token is not None and self.token.expired:
            raise AttemptInterrupted("this attempt ran out of time; its session can only be rolled back")
        if self._loan is not None:
            self._loan.check()

    def lend(self) -> None:
        """Code of others is about to get the connection."""
        if self._loan is None:
            self._loan = Loan(self)
        self._loan.begin()

    def note(self, error: BaseException) -> None:
        """An operation has failed."""
        if isinstance(error, StatementError):
            scrub(error)
            if isinstance(error, DBAPIError):
                self.fail(error)
        elif not isinstance(error, Exception):  # an interrupt: how far the statement got is unknown
            self.lose(error)

    def fail(self, error: BaseException) -> None:
        """A statement has failed: the commit must not ignore it."""
        self._failure = error
        if self._connection is not None and self._has_ended(self._connection):
            self.lose(error)

    def lose(self, error: BaseException) -> None:
        """Allow only a rollback from here on."""
        self._state = SessionState.LOST
        self._failure = error

    def _leaving(self) -> Connection:
        """The connection of a session that may end now."""
        if self._state in CANNOT_END:
            self._refuse(CANNOT_END)
        assert self._connection is not None
        return self._connection

    def _leave_to_parent(self, error: BaseException | None) -> None:
        """End it in a forked process, which must not touch the connection."""
        self._state = SessionState.ENDED
        if error is None:
            raise SessionError(FORKED)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit, or roll back because of the error. Either way, the connection goes back to its pool."""
        connection = self._leaving()
        if self.is_of_parent:
            _of_parents.append(connection)
            self._leave_to_parent(error)
            return
        lost, self._state = self._state is SessionState.LOST, SessionState.ENDED
        late = error is None and self.token is not None and self.token.expired
        if late:
            error = AttemptInterrupted("this attempt ran out of time; its transaction was rolled back")
        try:
            if error is not None:
                self._forget_canceller()
                roll_back(connection, error)
            else:
                self._commit(connection, lost)
        finally:
            self._failure = None  # its traceback leads back here
            try:
                if self._was_canceled and self.backend.cancels_late:
                    _discard(connection)
                self._give_back(connection)
            finally:
                if self._shared is not None:
                    free(self._shared)
                self.tell(self.committed)

        if late and error is not None:
            raise error

    def tell(self, committed: bool) -> None:
        """Call what waits for the outcome. A failure is only logged: the outcome matters more."""
        waiting, self.at_end = self.at_end, ()
        for each in waiting:
            try:
                each(committed)
            except Exception:  # noqa: BLE001
                _log.warning("could not end a session of a handler", exc_info=True)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process is a fork of the one that has this session. Its connection must not be touched here."""
        return self._generation != forks.generation

    def _forget_canceller(self) -> None:
        """No statement is canceled from here on."""
        canceller, self._canceller = self._canceller, None
        if canceller is not None and self.token is not None:
            self.token.remove(canceller)
            self._was_canceled = canceller.called

    @property
    def has_ended(self) -> bool:
        return self._state is SessionState.ENDED

    @property
    def is_open(self) -> bool:
        return self._state is _OPEN

    def check_entered(self) -> None:
        if self._state in CANNOT_END:
            self._refuse(CANNOT_END)

    def _refuse(self, refusals: dict[SessionState, str]) -> NoReturn:
        block = "async with" if self._engine.dialect.is_async else "with"
        raise SessionError(refusals[self._state].format(name=self._name, block=block))

    def _commit(self, connection: Connection, lost: bool) -> None:
        try:
            if lost or (self._failure is not None and self.backend.will_not_commit(connection)):
                raise SessionError(self._why_lost()) from self._failure
            if self.parts > 1:
                self.backend.check_parts(connection, self.parts - 1)
            if self._loan is not None:
                self._loan.end()
            # Without a transaction there is nothing to commit, and SQLAlchemy says nothing.
            if not connection.in_transaction() or self.backend.has_ended(connection):
                raise SessionError(ENDED_WITHIN)
            connection.commit()  # may be canceled: the database then answers whether it has committed
            self._forget_canceller()
        except BaseException as failure:
            scrub(failure)  # constraints may be checked only now
            self._forget_canceller()
            roll_back(connection, failure, after_commit=True)
            raise
        self.backend.check_files(connection)  # deleted meanwhile, it has this commit, and nobody has it
        self.committed = True

    def _why_lost(self) -> str:
        return str(self._failure) if isinstance(self._failure, SessionError) else FAILED_WITHIN

    def _give_back(self, connection: Connection) -> None:
        """Return the connection to its pool. A failure is only logged: the transaction's outcome matters more."""
        try:
            if self.repeated and not connection.invalidated:
                self.backend.note_repeated(connection, repeated=False)
            connection.close()
            if self._engine.pool is not self._pool:
                self._pool.dispose()  # the engine was disposed meanwhile: this pool lends nothing any more
        except Exception:  # noqa: BLE001
            _log.warning("could not return a connection to its pool", exc_info=True)

    def _has_ended(self, connection: Connection) -> bool:
        return connection.invalidated or self.backend.has_ended(connection)


class BlockingSessionPort(DbTransaction):
    """How a session for threads reaches its connection."""

    def __init__(self, engine: Engine, session: str) -> None:
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise ConfigurationError(
                f"DbSession needs an Engine from create_engine with a synchronous driver, not {engine!r}; "
                "for an AsyncEngine, use AsyncDbSession"
            )
        super().__init__(engine, session)

    async def enter(self) -> None:
        self.__enter__()

    async def leave(self, error: BaseException | None) -> None:
        self.__exit__(None, error, None)


def roll_back(connection: Connection, cause: BaseException, *, after_commit: bool = False) -> None:
    """Roll back because of `cause`, which stays the error the caller sees.

    `after_commit`: a commit has failed. SQLAlchemy then considers the transaction over; the database may not.
    """
    try:
        connection.rollback()
        if after_commit and not connection.invalidated:
            connection.connection.rollback()
    except BaseException as failure:
        _discard(connection)
        if not isinstance(failure, Exception):
            raise
        cause.add_note(f"The rollback failed too, and the connection was discarded: {redact(str(failure))}")
        _log.warning("rollback failed; discarding the connection ends its transaction", exc_info=True)


def _discard(connection: Connection) -> None:
    try:
        connection.invalidate()
    except Exception:  # noqa: BLE001
        _log.warning("could not close a broken connection", exc_info=True)


def reserve(pool: StaticPool) -> Pool:
    """Claim a pool that has one connection for everyone; `free` it at the end. Raises if another session has it.

    Two sessions on one connection would be one transaction, and the first to end would end both. The second is refused
    before it touches the connection: even returning it would roll the first one back.
    """
    with _lock:
        if pool in _in_use:
            raise SessionError(
                "this engine has one connection for all sessions (StaticPool), and another session is using it; "
                "end that one first, or use a database file"
            )
        _in_use.add(pool)
    return pool


def free(pool: Pool) -> None:
    with _lock:
        _in_use.discard(pool)


@contextmanager
def reserved(engine: Engine) -> Iterator[None]:
    """Reserve the engine's pool for the block if it has one connection for everyone."""
    if not isinstance(engine.pool, StaticPool):
        yield
        return
    pool = reserve(engine.pool)
    try:
        yield
    finally:
        free(pool)


@contextmanager
def regardless() -> Iterator[None]:
    """Commit sessions of this block even if the attempt has run out of time: they record what has happened."""
    before = current_attempt.set(None)
    try:
        yield
    finally:
        current_attempt.reset(before)
