"""What an inbox needs in addition to its database: sessions for handlers, and a way to call user code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import Engine

from onceward._coroutines import all_awaited, ending
from onceward._functions import awaiting, check_result, name_of
from onceward._process.forks import UserCode
from onceward._sync import Raised
from onceward.db.parts import BlockingPartPort
from onceward.db.transaction import BlockingSessionPort
from onceward.inbox.attempts import AsyncGate, BlockingGate
from onceward.inbox.event import Event
from onceward.inbox.sessions import EffectfulSession, InboxSession, Joined
from onceward.inbox.sessions.doubts import UnsettledEffects
from onceward.inbox.sessions.rules import Sends
from onceward.storage.database import AsyncStoragePorts, BlockingStoragePorts
from onceward.task.exceptions import postponement_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.db.session import DbSession
    from onceward.db.session_asyncio import AsyncDbSession
    from onceward.db.transaction_asyncio import AsyncSessionPort
    from onceward.inbox.effects import Claim, Ledger
    from onceward.inbox.sessions.session_asyncio import AsyncEffectfulSession, AsyncInboxSession

T = TypeVar("T")


class Session(Protocol):
    """A session as the inbox sees it."""

    event: Event
    sends: Sends
    unsettled: UnsettledEffects | None

    async def apply(self, operation: Callable[..., T], *args: Any) -> T:
        """Run one operation of the store in the session's transaction."""
        ...


class BlockingInboxPorts(BlockingStoragePorts):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.gate = BlockingGate()
        self.session = partial(InboxSession, engine)

    def whole(self) -> BlockingSessionPort:
        """A transaction for several events, each in a `part` of it."""
        return BlockingSessionPort(self.engine, InboxSession.__name__)

    async def apply(self, whole: BlockingSessionPort, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation on the transaction as a whole."""
        return whole.run(operation, *args)

    def part(self, whole: BlockingSessionPort, number: int) -> InboxSession:
        return InboxSession.within(self.engine, BlockingPartPort(whole, number))

    def effectful(self, event: Event, claim: Claim, ledger: Ledger) -> EffectfulSession:
        return EffectfulSession(self.engine, event, claim, ledger)

    def join(self, session: DbSession, event: Event) -> Session:
        return Joined(session, event)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """User code. What it raises comes as `Raised`."""
        try:
            # If it has not run, committing would lose the event.
            with all_awaited(), UserCode(name_of(function)):
                return check_result(function(*args), function)
        except Exception as error:
            raise Raised(postponement_of(error) or error) from error


class AsyncInboxPorts(AsyncStoragePorts):
    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.gate = AsyncGate()

    def session(self) -> AsyncInboxSession:
        from onceward.inbox.sessions.session_asyncio import AsyncInboxSession

        session = AsyncInboxSession(self.engine)
        session.port.transaction.repeated = True
        return session

    def whole(self) -> AsyncSessionPort:
        from onceward.db.transaction_asyncio import AsyncSessionPort

        whole = AsyncSessionPort(self.engine, "AsyncInboxSession")
        whole.transaction.repeated = True
        return whole

    async def apply(self, whole: AsyncSessionPort, operation: Callable[..., T], *args: Any) -> T:
        return await whole.run(operation, *args)

    def part(self, whole: AsyncSessionPort, number: int) -> AsyncInboxSession:
        from onceward.db.transaction_asyncio import AsyncPartPort
        from onceward.inbox.sessions.session_asyncio import AsyncInboxSession

        return AsyncInboxSession.within(self.engine, AsyncPartPort(whole, number))

    def effectful(self, event: Event, claim: Claim, ledger: Ledger) -> AsyncEffectfulSession:
        from onceward.inbox.sessions.session_asyncio import AsyncEffectfulSession

        return AsyncEffectfulSession(self.engine, event, claim, ledger)

    def join(self, session: AsyncDbSession, event: Event) -> Session:
        from onceward.inbox.sessions.session_asyncio import AsyncJoined

        return AsyncJoined(session, event)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """User code. What it raises comes as `Raised`."""
        try:
            with all_awaited():
                return await ending(awaiting(function)(*args))
        except Exception as error:
            raise Raised(postponement_of(error) or error) from error


InboxPorts = BlockingInboxPorts | AsyncInboxPorts
