"""How a session for asyncio reaches its connection: SQLAlchemy runs every operation in a greenlet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from onceward.db.operations import OneStatement
from onceward.db.parts import PartTransaction
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.task.cancellation import current_token

P = ParamSpec("P")
T = TypeVar("T")


class SessionTurn:
    """Lets one task at a time use a session. Like asyncio's lock, but without a coroutine if nobody waits."""

    __slots__ = ("_waiting", "taken")

    def __init__(self) -> None:
        self.taken = False
        """Set it, if it is not. If it is, `wait`."""
        self._waiting: deque[asyncio.Future[None]] | None = None

    async def wait(self) -> None:
        if self._waiting is None:
            self._waiting = deque()
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it had just got its turn
                self.end()
            raise

    def end(self) -> None:
        """Give the turn to the next one that waits, if there is one."""
        while self._waiting:
            following = self._waiting.popleft()
            if not following.done():
                following.set_result(None)
                return
        self.taken = False


class AsyncSessionPort:
    """A `DbTransaction` in asyncio. Operations of several tasks run one after another."""

    def __init__(self, engine: AsyncEngine, session: str) -> None:
        if not isinstance(engine, AsyncEngine):
            raise ConfigurationError(
                f"AsyncDbSession needs an AsyncEngine from create_async_engine, not {engine!r}; "
                "for an Engine, use DbSession"
            )
        self._engine = engine
        self.transaction: DbTransaction = DbTransaction(engine.sync_engine, session)
        self._turn = SessionTurn()

    @property
    def committed(self) -> bool:
        return self.transaction.committed

    async def __aenter__(self) -> None:
        self.transaction.token = current_token()
        with self.transaction.opening():
            self._connection: AsyncConnection = await self._engine.connect()
            await self._connection.run_sync(self.transaction.begin)

    async def run(
        self, operation: Callable[Concatenate[DbTransaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        turn, transaction = self._turn, self.transaction
        if turn.taken:
            await turn.wait()
        else:
            turn.taken = True
        try:
            if isinstance(operation, OneStatement):
                transaction.check_running()
                try:
                    call = operation.prepare(transaction, *args, **kwargs)
                    if call is not None:
                        found = await transaction.backend.direct_async(*call)
                        if found is not None:
                            result: T = operation.result(found)
                            return result
                        transaction.return_words(call[-1])
                except BaseException as error:
                    transaction.note(error)
                    raise
            elif not transaction.is_open:
                transaction.check_entered()
            return await self._connection.run_sync(lambda _: transaction.run(operation, *args, **kwargs))
        finally:
            turn.end()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.transaction.is_of_parent:
            self.transaction.__exit__(
                kind, error, trace
            )  # without the event loop, which is the parent's, too
            return
        await self._finish(partial(self.transaction.__exit__, kind, error, trace))

    async def leave(self, error: BaseException | None) -> None:
        await self.__aexit__(None, error, None)

    enter = __aenter__

    async def _in_turn(self, call: Callable[[], T]) -> T:
        turn = self._turn
        if turn.taken:
            await turn.wait()
        else:
            turn.taken = True
        try:
            self.transaction.check_entered()
            return await self._connection.run_sync(lambda _: call())
        finally:
            turn.end()

    async def _finish(self, end: Callable[[], None]) -> None:
        """Wait until the session has ended, even if canceled; then raise the last cancellation."""
        # Without an event loop, as when a coroutine is closed after its loop, this raises before there is a coroutine
        # that nobody awaits.
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._in_turn(end))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
            if task.cancelled() and not self.transaction.has_ended:
                # An event loop that is closed cancels every task, also this one, which had not got its turn.
                task = loop.create_task(self._in_turn(end))
        if cancelled is None or task.cancelled():
            return task.result()
        failure = task.exception()
        if failure is not None:
            raise cancelled from failure
        raise cancelled


class AsyncPartPort(AsyncSessionPort):
    """A part of a transaction in asyncio: see `onceward.db.parts`."""

    def __init__(self, whole: AsyncSessionPort, number: int) -> None:
        self._part = self.transaction = PartTransaction(whole.transaction, number)
        self._turn = SessionTurn()
        self._connection = whole._connection

    def open_part(self) -> None:
        self._part.token = current_token()
        self._part.open()

    def end_at_once(self, error: BaseException | None) -> bool:
        return not self._turn.taken and self._part.end_at_once(error)
