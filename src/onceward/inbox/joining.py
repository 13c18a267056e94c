"""An event inside somebody else's session: the inbox's part of it, without beginning or ending anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from onceward.db import DbSession
from onceward.errors import ConfigurationError
from onceward.inbox.event import Event
from onceward.inbox.exceptions import EffectError
from onceward.inbox.session import NOT_EFFECTFUL

if TYPE_CHECKING:
    from onceward.db import AsyncDbSession

T = TypeVar("T")


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
