"""ORM sessions on the transaction of the inbox.

The session works in a savepoint, so its `rollback()` undoes what it has done, but not the inbox's record. `commit()`
and whatever else would end the transaction raises. For asyncio, the same session runs behind an `AsyncSession`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from sqlalchemy import event
from sqlalchemy.orm import Session

from onceward.db.errors import SessionError
from onceward.db.guests.connection import AT_RETURN
from onceward.db.guests.guest import Guest, Kind

_GUEST = "onceward_guest"
"""Key in the `info` of a session."""
OPEN = f"the transaction is open already, and {AT_RETURN}"
FAILED = (
    "a flush failed in this handler, which undid what its session had written; let the error propagate, or put what "
    "may fail into `with session.begin_nested():`, and catch it around that"
)
NEVER = (
    "a listener of after_commit on this session would never be called: the commit is the inbox's, and comes when the "
    "handler has returned; publish a message with the inbox's session, which is sent after it"
)
CLOSE = "the inbox ends the session when the handler returns; remove the call"


class OrmGuest(Guest):
    """An ORM session of the annotated class."""

    _committing = False
    """Whether its listeners hear of the commit that is to come."""

    def __init__(self, session: Any, kind: Kind) -> None:
        super().__init__(session, kind)
        options = {"join_transaction_mode": "create_savepoint", "info": {_GUEST: self}}
        if kind.asynchronous:
            self.given = _guarded_async(kind.cls)(**options)
            self.orm: Session = self.given.sync_session
        else:
            self.given = self.orm = _guarded(kind.cls)(**options)

    @property
    def has_changes(self) -> bool:
        orm = self.orm
        return bool(orm.new or orm.deleted or any(map(orm.is_modified, orm.dirty)))

    def check_commit(self) -> None:
        """Refuse the commit of the session's transaction, however it is called. That of a savepoint is fine."""
        if not self._committing and self.orm.get_nested_transaction() is None:
            self.refuse("commit()", AT_RETURN)

    def end_reads(self) -> None:
        Session.rollback(self.orm)  # nothing was written; what was read is read again later

    def flush(self) -> None:
        orm = self.orm
        if orm.dispatch.after_commit.listeners:  # of this session; those of a class have other commits
            raise SessionError(NEVER)
        if not orm.in_transaction() and not self.has_changes:
            return
        if not orm.is_active:
            raise SessionError(FAILED)
        # Listeners may add to the flush.
        self._committing = True
        orm.dispatch.before_commit(orm)
        self._committing = False
        orm.flush()

    def keep(self) -> None:
        for transaction in (self.orm.get_nested_transaction(), self.orm.get_transaction()):
            if transaction is not None:
                transaction.close()

    def undo(self) -> None:
        try:
            Session.rollback(self.orm)  # what it added is new again, for another session
        finally:
            Session.close(self.orm)


class GuardedSession:
    """Goes before the annotated class."""

    info: dict[Any, Any]

    def get_bind(self, *_: Any, **__: Any) -> Any:
        return self._guest.connection()

    @property
    def _guest(self) -> OrmGuest:
        guest: OrmGuest = self.info[_GUEST]
        return guest

    def commit(self) -> None:
        self._guest.refuse("commit()", AT_RETURN)

    def prepare(self) -> None:
        self._guest.refuse("prepare()", AT_RETURN)

    def begin(self, nested: bool = False) -> Any:
        if nested:
            return super().begin(nested=True)  # type: ignore[misc]
        return self._guest.refuse("begin()", OPEN)

    def close(self) -> None:
        self._guest.refuse("close()", CLOSE)

    def reset(self) -> None:
        self._guest.refuse("reset()", CLOSE)

    def invalidate(self) -> None:
        self._guest.refuse("invalidate()", CLOSE)

    def __enter__(self) -> NoReturn:
        self._guest.refuse("`with session:`", CLOSE)


class GuardedAsyncSession:
    """Its calls are refused where they are made, because the greenlet behind them does not know the caller's line."""

    info: dict[Any, Any]

    async def commit(self) -> None:
        self.info[_GUEST].refuse("commit()", AT_RETURN)

    def begin(self) -> NoReturn:
        guest: OrmGuest = self.info[_GUEST]
        guest.refuse("begin()", OPEN)

    async def close(self) -> None:
        self.info[_GUEST].refuse("close()", CLOSE)

    async def aclose(self) -> None:
        await self.close()

    async def reset(self) -> None:
        self.info[_GUEST].refuse("reset()", CLOSE)

    async def invalidate(self) -> None:
        self.info[_GUEST].refuse("invalidate()", CLOSE)

    async def __aenter__(self) -> NoReturn:
        guest: OrmGuest = self.info[_GUEST]
        guest.refuse("`async with session:`", CLOSE)


@cache
def _guarded(annotated: type[Any]) -> type[Any]:
    made = type(annotated.__name__, (GuardedSession, annotated), {"__module__": annotated.__module__})
    event.listen(made, "before_commit", lambda orm: orm.info[_GUEST].check_commit())
    return made


@cache
def _guarded_async(annotated: type[Any]) -> type[Any]:
    body = {
        "sync_session_class": _guarded(annotated.sync_session_class),
        "__module__": annotated.__module__,
    }
    return type(annotated.__name__, (GuardedAsyncSession, annotated), body)
