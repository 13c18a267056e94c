"""The sessions that handlers get in asyncio."""

# make faces writes session.py, with
#   run_blocking: self._ledger
#   port: leave, apply

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from onceward._sync import Raised
from onceward.db.errors import SessionError
from onceward.db.session_asyncio import AsyncDbSession
from onceward.durations import Duration
from onceward.errors import ConfigurationError
from onceward.inbox.errors import EffectError, LeaseLostError
from onceward.inbox.event import Event
from onceward.inbox.sessions.doubts import UnsettledEffects
from onceward.inbox.sessions.rules import (
    IN_CALL,
    LOST,
    NO_SENDS,
    NOT_DECIDED,
    NOT_EFFECTFUL,
    WRITTEN,
    Sends,
    calling,
    dismiss,
    has_written,
)

if TYPE_CHECKING:
    from onceward.db.guests.guest import Guest
    from onceward.inbox.effects import Claim, Ledger, Reconcile

T = TypeVar("T")


class AsyncInboxSession(AsyncDbSession):
    """An `AsyncDbSession` whose commit includes the inbox's row for `event`."""

    event: Event
    """The event in flight, as it was delivered."""
    sends: Sends = NO_SENDS
    unsettled: UnsettledEffects | None = None
    """None as long as the handler has called no effect."""
    guests: tuple[Guest, ...] = ()
    """Libraries that use its transaction: see `onceward.db.guests`."""

    async def send(
        self,
        target: str | Callable[..., Any],
        payload: Any,
        *,
        id: str | None = None,
        name: str | None = None,
        key: str | None = None,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> str:
        """Publish the payload if, and when, this session commits. Returns the id of the message.

        `target` is a consumer or producer function of the app, or a URL. The id is derived from the event, the consumer
        and `name`, or else the number of this send in the attempt, so a repeated handler publishes the same id; name
        each message whose number may change. Messages with the same `key` and target go out in the order in which they
        were sent. `delay` (a timedelta, or seconds) or `at` (a datetime with a time zone) hold it back. `headers`
        become the metadata of the transaction.

        Raises `OutboxError` or `PayloadError` if it cannot be sent like this; nothing is written then. A message is a
        write: effects come before it.
        """
        given = {"key": key, "delay": delay, "at": at, "headers": headers}
        made = self.sends.message(target, payload, id=id, name=name, **given)
        return await self.run(self.sends.write, made)

    async def effect(
        self,
        name: str,
        call: Callable[[str], Awaitable[Any]],
        *,
        reconcile: Reconcile | None = None,
        cancel: Callable[[], object] | None = None,
        key_valid_for: Duration | None = None,
    ) -> Any:
        """Run `await call(key)`, an effect outside the database, and never again once its outcome is known.

        The call cannot use this session, or another one on its transaction: return what you need, and write after it.

        The key is the same over every retry and every new claim of the event; pass it to the provider as the
        idempotency key. The result of `call` is stored, and a retry gets it without calling again. After a crash in
        between it is unknown whether the effect happened: then `await reconcile(key)` returns `Done(result)` or
        `NOT_DONE`; without it, `call` is repeated with the same key. Needs a contract with `mode="effectful"`.

        Each effect of an event has a name of its own, such as `f"ship-{item.id}"`: a second use of a name in one
        attempt raises `ContractError`. `key_valid_for` says how long the provider remembers a key, as in `hours(24)`;
        after that, an effect in doubt is not called again unless `reconcile` says `NOT_DONE`: without it the event
        becomes a dead letter in doubt. If the provider refused, raise `EffectRefused` from `call`: the next attempt or
        a redrive then calls again, with a new key.

        `cancel()` is called in another thread if the attempt runs out of time during the call, and must end it: close
        the socket of a client that only this call uses.
        """
        self.unsettled = self.unsettled or UnsettledEffects()
        with self.unsettled.note(name):
            raise EffectError(NOT_EFFECTFUL)


class AsyncEffectfulSession(AsyncInboxSession):
    """Opens its transaction only when the handler uses the database, and holds none during an effect."""

    def __init__(self, engine: AsyncEngine, event: Event, claim: Claim, ledger: Ledger) -> None:
        super().__init__(engine)
        self.event = event
        self._claim = claim
        self._ledger: Ledger | None = ledger
        ledger.check_call = self._check_call
        self._inner: AsyncDbSession | None = None
        self.run = self._run_lazily
        self.unsettled: UnsettledEffects = UnsettledEffects()

    @property
    def committed(self) -> bool:
        return self._inner is not None and self._inner.committed

    async def effect(
        self,
        name: str,
        call: Callable[[str], Awaitable[Any]],
        *,
        reconcile: Reconcile | None = None,
        cancel: Callable[[], object] | None = None,
        key_valid_for: Duration | None = None,
    ) -> Any:
        if self._ledger is None:
            raise EffectError(NOT_DECIDED)
        with self.unsettled.note(name):
            await self._let_go()
            try:
                return await self._ledger.effect(name, call, reconcile, cancel, key_valid_for)
            except Raised as carried:
                raised = carried.unwrap()
            raise raised

    async def _run_lazily(self, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._claim.lost:
            raise LeaseLostError(LOST.format(self.event.tracking_id))
        if self._ledger is None:
            raise SessionError("this session has ended with the attempt at its event")
        if self._claim in calling.get():
            raise SessionError(IN_CALL)
        if self._inner is None:
            inner = AsyncDbSession(self._engine)
            await inner.__aenter__()
            self._inner = inner
        return await self._inner.run(operation, *args, **kwargs)

    def _check_call(self) -> None:
        """Raise if the call of an effect has changed objects, which a flush would write later."""
        if any(each.has_changes for each in self.guests):
            raise SessionError(IN_CALL)

    async def _let_go(self) -> None:
        """End the transaction, in which nothing was written yet, so nothing is locked during the call."""
        if any(each.has_changes for each in self.guests):
            raise SessionError(WRITTEN)
        inner = self._inner
        if inner is None:
            return
        if await inner.run(has_written):
            raise SessionError(WRITTEN)
        await inner.run(dismiss, self.guests)
        self._inner = None
        await inner.__aexit__(None, None, None)

    async def leave(self, error: BaseException | None) -> None:
        self._ledger = None
        if self._inner is not None:
            await self._inner.__aexit__(None, error, None)


class AsyncJoined:
    """An event inside the caller's session, which the caller begins and ends. Everything else is delegated to it."""

    unsettled: UnsettledEffects | None = None

    def __init__(self, session: AsyncDbSession, event: Event) -> None:
        if not isinstance(session, AsyncDbSession):
            raise ConfigurationError(f"session must be an AsyncDbSession, not {type(session).__name__}")
        self._session = session
        self.event = event
        self.sends: Sends = NO_SENDS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def effect(self, name: Any = None, *_: Any, **__: Any) -> Any:
        self.unsettled = self.unsettled or UnsettledEffects()
        with self.unsettled.note(name):
            raise EffectError(NOT_EFFECTFUL)

    async def send(
        self,
        target: str | Callable[..., Any],
        payload: Any,
        *,
        id: str | None = None,
        name: str | None = None,
        **given: Any,
    ) -> str:
        """As `AsyncInboxSession.send`."""
        options = {"key": None, "delay": None, "at": None, "headers": None, **given}
        made = self.sends.message(target, payload, id=id, name=name, **options)
        return await self._session.run(self.sends.write, made)

    async def apply(self, operation: Callable[..., T], *args: Any) -> T:
        return await self._session.run(operation, *args)
