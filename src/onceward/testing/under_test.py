"""The app under test, as a test sees it:

with onceward.testing.app(app, setup=create_tables) as t:
    t.send(charge, {"id": 1})
    t.drain()
    assert t.rows("SELECT id FROM charges") == [{"id": 1}]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine

from onceward._time import wall
from onceward.app.app import Onceward
from onceward.errors import ConfigurationError
from onceward.task.report import Report
from onceward.testing.harness import Harness
from onceward.testing.queues import Published as Published
from onceward.testing.recorder import RecordedEffect as RecordedEffect

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetter


class Tested:
    """What a test can look at."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    @property
    def effects(self) -> list[RecordedEffect]:
        """The calls of `session.effect`, in their order."""
        return self._harness.effects

    @property
    def published(self) -> list[Published]:
        """The messages that the outbox and producers have published; those for one target in their order."""
        return self._harness.published

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters of all consumers."""
        return self._harness.dead_letters()

    @property
    def now(self) -> datetime:
        """The time of the test."""
        return datetime.fromtimestamp(wall(), UTC)

    @property
    def engine(self) -> Engine:
        """Connects to the test's database."""
        self._harness.check_open()
        return self._harness.engine

    def rows(self, query: str, **values: Any) -> list[dict[str, Any]]:
        """The rows of a query with `:name` parameters, as dicts."""
        return self._harness.rows(query, **values)


class AppUnderTest(Tested):
    """An app under test, in a `with` block."""

    def __init__(self, harness: Harness, runner: asyncio.Runner) -> None:
        super().__init__(harness)
        self._runner = runner
        self._running = Lock()

    def send(self, target: Any, message: Any, *, id: str | None = None) -> str:
        """Put a message into the queue of a consumer, which is its function or its name. Returns the id."""
        sent: str = self._run(lambda: self._harness.send(target, message, id=id))
        return sent

    def drain(self) -> Report:
        """Consume and relay until nothing is due. Returns how many messages succeeded and failed."""
        report: Report = self._run(self._harness.drain)
        return report

    def advance(self, duration: str | float | timedelta) -> Report:
        """Let time pass ("24h", seconds or a timedelta), and do whatever becomes due, when it is due."""
        report: Report = self._run(lambda: self._harness.advance(duration))
        return report

    def _run(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if not self._running.acquire(blocking=False):
            raise ConfigurationError(
                "another call of send, drain or advance is still running, in a handler or another thread; call them "
                "one after the other"
            )
        try:
            self._harness.check_open()
            return self._runner.run(call())
        finally:
            self._running.release()


class AsyncAppUnderTest(Tested):
    """An app under test, in an `async with` block."""

    async def send(self, target: Any, message: Any, *, id: str | None = None) -> str:
        """As `AppUnderTest.send`."""
        return await self._harness.send(target, message, id=id)

    async def drain(self) -> Report:
        """As `AppUnderTest.drain`."""
        return await self._harness.drain()

    async def advance(self, duration: str | float | timedelta) -> Report:
        """As `AppUnderTest.advance`."""
        return await self._harness.advance(duration)


class UnderTest:
    """An app that a `with` or `async with` puts under test."""

    def __init__(self, harness: Callable[[], Harness]) -> None:
        self._make = harness

    def __enter__(self) -> AppUnderTest:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ConfigurationError("an event loop is running here; write `async with testing.app(…) as t:`")
        self._harness, self._runner = self._make(), asyncio.Runner()
        try:
            self._runner.run(self._harness.open())
        except BaseException:
            self._runner.close()
            raise
        return AppUnderTest(self._harness, self._runner)

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._harness.close())
        finally:
            self._runner.close()

    async def __aenter__(self) -> AsyncAppUnderTest:
        self._harness = self._make()
        await self._harness.open()
        return AsyncAppUnderTest(self._harness)

    async def __aexit__(self, *_: object) -> None:
        await self._harness.close()


def app(
    app: Onceward,
    *,
    setup: Callable[[Any], object] | None = None,
    services: Mapping[Any, Any] | None = None,
) -> UnderTest:
    """`with testing.app(app) as t:`, and `async with` in a running event loop.

    `setup(engine)` creates your tables; `services` are fakes by type or name, as in `{Client: FakeClient()}`.
    """
    if not isinstance(app, Onceward):
        raise ConfigurationError(f"testing.app takes what Onceward(…) returned, not {type(app).__name__}")
    return UnderTest(lambda: Harness(app, services, setup))
