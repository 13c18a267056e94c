"""Dependencies for FastAPI: a session on the app's database for each request, and the app's outbox on it.

db = AppDatabase(shop)
web = FastAPI(lifespan=db.lifespan)
Database = Annotated[AsyncSession, Depends(db.session, scope="function")]
Events = Annotated[AsyncOutboxSender, Depends(db.outbox, scope="function")]
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from onceward.app.app import Onceward
from onceward.errors import ConfigurationError
from onceward.inbox import AsyncInbox
from onceward.outbox.sender_asyncio import AsyncOutboxSender


class AppDatabase:
    """The database of an app in a FastAPI service. Its sessions commit when the endpoint returns."""

    outbox: Callable[..., Any]
    """A dependency: `app.outbox(session)`, on the session of the request."""

    def __init__(self, app: Onceward, *, migrate: bool = True) -> None:
        """With `migrate`, the service creates the tables of inbox and outbox when it starts."""
        self._app = app
        self._migrate = migrate
        self._engine: AsyncEngine | None = None
        session = Depends(self.session, scope="function")

        async def outbox(session: Any = session) -> AsyncOutboxSender:
            sender: AsyncOutboxSender = app.outbox(session)
            return sender

        outbox.__annotations__.clear()  # FastAPI would take them for a request's
        self.outbox = outbox

    @asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        """Connect while the service runs: `FastAPI(lifespan=db.lifespan)`."""
        engine = self._engine = self._app.create_async_engine()
        try:
            if self._migrate:
                await AsyncInbox(engine).migrate()
            yield
        finally:
            self._engine = None
            await engine.dispose()

    @property
    def engine(self) -> AsyncEngine:
        if self._engine is None:
            raise ConfigurationError("the service has not started: write FastAPI(lifespan=db.lifespan)")
        return self._engine

    async def session(self) -> AsyncIterator[AsyncSession]:
        """A dependency: one transaction for a request. It commits if the endpoint returns, and rolls back if it raises.

        With `scope="function"` that happens before the answer is sent, so a client that sees it can rely on it.
        """
        async with AsyncSession(self.engine) as session, session.begin():
            yield session
