"""The sessions a handler gets in asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from onceward._sync import Raised
from onceward.db import SessionError
from onceward.db.session_asyncio import AsyncDbSession
from onceward.inbox.errors import EffectError, LeaseLostError
from onceward.inbox.event import Event
from onceward.inbox.sessions import LOST, NOT_DECIDED, NOT_EFFECTFUL, WRITTEN, has_written

if TYPE_CHECKING:
    from onceward.inbox.effects import Claim, Ledger, Reconcile

T = TypeVar("T")


class AsyncInboxSession(AsyncDbSession):
    """As `InboxSession`, awaited."""

    def __init__(self, engine: AsyncEngine, event: Event) -> None:
        super().__init__(engine)
        self.event = event

    async def effect(
        self, name: str, call: Callable[[str], Awaitable[Any]], *, reconcile: Reconcile | None = None
    ) -> Any:
        """As `InboxSession.effect`; `call` and `reconcile` are awaited."""
        raise EffectError(NOT_EFFECTFUL)

    async def _enter(self) -> None:
        await self.__aenter__()

    async def _leave(self, error: BaseException | None) -> None:
        await self.__aexit__(None, error, None)

    async def _apply(self, operation: Callable[..., T], *args: Any) -> T:
        return await self._run(operation, *args)


class AsyncEffectfulSession(AsyncInboxSession):
    """As `EffectfulSession`."""

    def __init__(self, engine: AsyncEngine, event: Event, claim: Claim, ledger: Ledger) -> None:
        super().__init__(engine, event)
        self._claim = claim
        self._ledger: Ledger | None = ledger
        self._inner: AsyncDbSession | None = None

    @property
    def committed(self) -> bool:
        return self._inner is not None and self._inner.committed

    async def effect(
        self, name: str, call: Callable[[str], Awaitable[Any]], *, reconcile: Reconcile | None = None
    ) -> Any:
        if self._ledger is None:
            raise EffectError(NOT_DECIDED)
        await self._let_go()
        try:
            return await self._ledger.effect(name, call, reconcile)
        except Raised as carried:
            raised = carried.raised
        raise raised

    async def _run(self, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._claim.lost:
            raise LeaseLostError(LOST.format(self.event.tracking_id))
        if self._ledger is None:
            raise SessionError("this session has ended with the attempt at its event")
        if self._inner is None:
            inner = AsyncDbSession(self._engine)
            await inner.__aenter__()
            self._inner = inner
        return await self._inner._run(operation, *args, **kwargs)

    async def _let_go(self) -> None:
        inner = self._inner
        if inner is None:
            return
        if await inner._run(has_written):
            raise SessionError(WRITTEN)
        self._inner = None
        await inner.__aexit__(None, None, None)

    async def _enter(self) -> None:
        """Later."""

    async def _leave(self, error: BaseException | None) -> None:
        self._ledger = None
        if self._inner is not None:
            await self._inner.__aexit__(None, error, None)
