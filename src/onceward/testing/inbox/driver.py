"""Drives inboxes of both kinds through the same blocking calls, so each test is written once.

In asyncio, each handler runs in its own thread, with a session whose methods block, so the code of a test and its
concurrency are the same in both modes.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

from sqlalchemy import Engine

from onceward.db import DbSession
from onceward.inbox import AsyncInbox, Contract, Event, Inbox, Result
from onceward.inbox.errors import Busy
from onceward.task.exceptions import Postponed

LIMIT = 30.0
"""Seconds after which a test counts as hanging."""


def until(condition: Callable[[], object]) -> None:
    """Wait until another thread makes the condition true."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.002)


class BlockingSession:
    """An async session with blocking methods."""

    def __init__(self, session: Any, driver: InboxDriver) -> None:
        self._session = session
        self._driver = driver

    def effect(
        self,
        name: str,
        call: Callable[[str], Any],
        *,
        reconcile: Callable[[str], Any] | None = None,
        **more: Any,
    ) -> Any:
        hook = None if reconcile is None else self._driver.adapt(reconcile)
        effect = self._session.effect(name, self._driver.adapt(call), reconcile=hook, **more)
        return self._driver.wait_for(effect)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session, name)
        if inspect.iscoroutinefunction(value):
            return lambda *args, **more: self._driver.wait_for(value(*args, **more))
        return value


class InboxDriver:
    """An inbox with blocking methods. As a context manager, it disposes of the engine at the end.

    Any thread may call it. `call` reaches the other methods of `Inbox`.
    """

    def __init__(self, engine: Any, clock: Any) -> None:
        self.engine = engine
        self.clock = clock
        self.asynchronous = not isinstance(engine, Engine)
        self._loop: asyncio.AbstractEventLoop | None = None
        if self.asynchronous:
            self._threads = ThreadPoolExecutor(64, thread_name_prefix="inbox-handler")
            ready = threading.Event()
            self._thread = threading.Thread(
                target=asyncio.run, args=(self._run_loop(ready),), name="inbox-driver"
            )
            self._thread.start()
            ready.wait()
        self.inbox: Any = (AsyncInbox if self.asynchronous else Inbox)(engine, clock=clock)

    async def _run_loop(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        ready.set()
        await self._over.wait()

    # ── the inbox ───────────────────────────────────────────────────────────────────────────────────────

    def process(
        self,
        contract: Contract,
        event: Any,
        handler: Callable[[Event, Any], Any],
        *,
        session: Any = None,
    ) -> Result:
        inner = session._session if isinstance(session, BlockingSession) else session
        result: Result = self.call("process", contract, event, self.adapt(handler), session=inner)
        return result

    def settle(self, contract: Contract, event: Any, handler: Callable[[Event, Any], Any]) -> Result:
        """Deliver an event until it is settled, as a source does."""
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                return self.process(contract, event, handler)
            except Postponed:
                assert time.monotonic() < deadline, "it was never settled"
                time.sleep(0.01)

    def is_busy(self, contract: Contract, event: Any, handler: Callable[[Event, Any], Any]) -> bool:
        try:
            self.process(contract, event, handler)
        except Busy:
            return True
        return False

    def call(self, name: str, *args: Any, **more: Any) -> Any:
        """Call a method of the inbox."""
        return self.wait_for(getattr(self.inbox, name)(*args, **more))

    # ── the database ────────────────────────────────────────────────────────────────────────────────────

    @property
    def plain_engine(self) -> Engine:
        """The synchronous engine, to listen to its events."""
        engine: Engine = self.engine.sync_engine if self.asynchronous else self.engine
        return engine

    @contextmanager
    def session(self) -> Iterator[Any]:
        """A session that does not belong to the inbox."""
        if not self.asynchronous:
            with DbSession(self.engine) as session:
                yield session
            return
        from onceward.db import AsyncDbSession

        inner = AsyncDbSession(self.engine)
        self.wait_for(inner.__aenter__())
        try:
            yield BlockingSession(inner, self)
        except BaseException as error:
            self.wait_for(inner.__aexit__(type(error), error, None))
            raise
        self.wait_for(inner.__aexit__(None, None, None))

    def do(self, sql: str, **params: Any) -> None:
        with self.session() as session:
            session.execute(sql, params or None)

    def rows(self, sql: str, **params: Any) -> list[dict[str, Any]]:
        with self.session() as session:
            found: list[dict[str, Any]] = session.fetch_all(sql, params or None)
            return found

    # ── both modes ──────────────────────────────────────────────────────────────────────────────────────

    def wait_for(self, result: Any) -> Any:
        """Run a coroutine on the driver's event loop and return its result; return anything else as it is."""
        if not inspect.iscoroutine(result):
            return result
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(result, self._loop).result()

    def adapt(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a plain function into one that the inbox can call in this mode."""
        if not self.asynchronous or inspect.iscoroutinefunction(function):
            return function

        def attempt(arguments: list[Any]) -> tuple[Any, BaseException | None]:
            try:
                return function(*arguments), None
            except BaseException as error:  # noqa: BLE001  raised again by `call`
                return None, error

        async def call(*arguments: Any) -> Any:
            given = [self._blocking(argument) for argument in arguments]
            context = contextvars.copy_context()
            value, error = await asyncio.get_running_loop().run_in_executor(
                self._threads, context.run, attempt, given
            )
            if error is not None:
                raise error
            return value

        return call

    def _blocking(self, argument: Any) -> Any:
        return BlockingSession(argument, self) if hasattr(argument, "execute_scalar") else argument

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A heart with a short lease may be about to beat, with a connection that nobody would close.
        hearts = self.inbox.processor.heartbeat.held
        until(lambda: all(lease > 10 for lease in list(hearts)))
        self.wait_for(self.engine.dispose())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
            self._threads.shutdown()
