"""The sessions a handler gets: the transaction that also holds the inbox's row, and the way to effects outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Engine

from onceward._sync import as_function
from onceward.db import DbSession, SessionError
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.inbox.errors import EffectError, LeaseLostError
from onceward.inbox.event import Event

if TYPE_CHECKING:
    from onceward.db import AsyncDbSession
    from onceward.inbox.effects import Claim, Ledger, Reconcile


T = TypeVar("T")

NOT_EFFECTFUL = (
    "the contract of this consumer says mode='transactional': its handler runs inside a database transaction, and an "
    "outside call cannot be part of that; say mode='effectful' to have effects written down before they are called"
)
NOT_DECIDED = (
    "no effect before the inbox has decided that the event is new: effects belong into the running handler"
)
WRITTEN = (
    "effects come before writes: this session has uncommitted changes, and would hold them, and the database's locks, "
    "during an outside call. Call the effects first, then write"
)
LOST = "the lease on event {} was lost, and somebody else may have it; nothing of this attempt is committed"


class InboxSession(DbSession):
    """A `DbSession` whose commit includes the inbox's row for `event`."""

    def __init__(self, engine: Engine, event: Event) -> None:
        super().__init__(engine)
        self.event = event
        """The event in hand, as it was delivered."""

    def effect(self, name: str, call: Callable[[str], Any], *, reconcile: Reconcile | None = None) -> Any:
        """Run `call(key)`, an effect outside the database, at most once to its known end.

        The key is the same over every retry and every new claim of the event; give it to the provider as its
        idempotency key. What `call` returns is kept, and a retry gets it without calling again. After a crash
        in between nobody knows whether it happened: then `reconcile(key)` says `Done(result)` or `NOT_DONE`;
        without it, `call` is made again with the same key. Needs a contract with `mode="effectful"`.
        """
        raise EffectError(NOT_EFFECTFUL)

    async def _enter(self) -> None:
        self.__enter__()

    async def _leave(self, error: BaseException | None) -> None:
        self.__exit__(None, error, None)

    async def _apply(self, operation: Callable[..., T], *args: Any) -> T:
        return self._run(operation, *args)


class EffectfulSession(InboxSession):
    """Opens its transaction only when something is asked of the database, and holds none during an effect."""

    def __init__(self, engine: Engine, event: Event, claim: Claim, ledger: Ledger) -> None:
        super().__init__(engine, event)
        self._claim = claim
        self._ledger: Ledger | None = ledger
        self._inner: DbSession | None = None
        self._run = self._lazily

    @property
    def committed(self) -> bool:
        return self._inner is not None and self._inner.committed

    def effect(self, name: str, call: Callable[[str], Any], *, reconcile: Reconcile | None = None) -> Any:
        if self._ledger is None:
            raise EffectError(NOT_DECIDED)
        self._let_go()
        return as_function(self._ledger.effect)(name, call, reconcile)

    def _lazily(self, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._claim.lost:
            raise LeaseLostError(LOST.format(self.event.tracking_id))
        if self._ledger is None:
            raise SessionError("this session has ended with the attempt at its event")
        if self._inner is None:
            inner = DbSession(self._engine)
            inner.__enter__()
            self._inner = inner
        return self._inner._run(operation, *args, **kwargs)

    def _let_go(self) -> None:
        """Nothing was written so far: end the transaction, so that nothing is locked during the call."""
        inner = self._inner
        if inner is None:
            return
        if inner._run(has_written):
            raise SessionError(WRITTEN)
        self._inner = None
        inner.__exit__(None, None, None)

    async def _enter(self) -> None:
        """Later."""

    async def _leave(self, error: BaseException | None) -> None:
        self._ledger = None
        if self._inner is not None:
            self._inner.__exit__(None, error, None)


def has_written(transaction: DbTransaction) -> bool:
    return transaction.backend.has_written(transaction.connection)


# An event inside somebody else's session: the inbox's part of it, without beginning or ending anything.


class Joined:
    """The caller's session, with the event. Everything else is the session's own."""

    def __init__(self, session: DbSession, event: Event) -> None:
        self._session = session
        self.event = event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def effect(self, *_: Any, **__: Any) -> Any:
        raise EffectError(NOT_EFFECTFUL)

    async def _enter(self) -> None: ...
    async def _leave(self, error: BaseException | None) -> None: ...
    async def _apply(self, operation: Callable[..., T], *args: Any) -> T:
        return self._session._run(operation, *args)


class AsyncJoined(Joined):
    _session: Any

    async def effect(self, *_: Any, **__: Any) -> Any:
        raise EffectError(NOT_EFFECTFUL)

    async def _apply(self, operation: Callable[..., T], *args: Any) -> T:
        result: T = await self._session._run(operation, *args)
        return result


def joined(session: DbSession, event: Event) -> Joined:
    if not isinstance(session, DbSession):
        raise ConfigurationError(f"session must be a DbSession, not {type(session).__name__}")
    return Joined(session, event)


def joined_async(session: AsyncDbSession, event: Event) -> AsyncJoined:
    from onceward.db import AsyncDbSession

    if not isinstance(session, AsyncDbSession):
        raise ConfigurationError(f"session must be an AsyncDbSession, not {type(session).__name__}")
    return AsyncJoined(session, event)  # type: ignore[arg-type]
