"""Both modes of the queue behind the same calls, which are made, or awaited on the world's event loop.

Everything else a test does to Redis with `admin`, a plain client.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from sqlalchemy import TextClause, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.queue import (
    AsyncQueueConsumer,
    AsyncRedisStreamsQueue,
    QueueConfig,
    QueueConsumer,
    QueueMessage,
    RedisStreamsQueue,
)

_numbers = itertools.count()
INSERT = text("INSERT INTO effects (id) VALUES (:id)")


class Driven:
    """A queue or consumer whose methods are called the same way in both modes."""

    def __init__(self, thing: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        self.thing = thing
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.thing, name)
        return lambda *args, **more: self._ended(method(*args, **more))

    def _ended(self, result: Any) -> Any:
        if inspect.isasyncgen(result):
            return self._iterated(result)
        if inspect.isawaitable(result):
            assert self._loop is not None
            return self._loop.run_until_complete(result)
        return result

    def _iterated(self, generator: Any) -> Iterator[Any]:
        while True:
            try:
                yield self._ended(generator.__anext__())
            except StopAsyncIteration:
                return


class QueueWorld:
    def __init__(self, mode: str, url: str, directory: Path) -> None:
        self.mode = mode
        self.asynchronous = mode == "asyncio"
        self.url = url
        self.stream = f"queue-{next(_numbers)}"
        self.admin: Any = redis.Redis.from_url(url)
        self._database = directory / "effects.db"
        self._loop = asyncio.new_event_loop() if self.asynchronous else None
        self._things: list[Driven] = []
        self._clients: list[Any] = []
        self._make_table()

    def __enter__(self) -> QueueWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for thing in self._things:
            thing.close()
        if self._loop is not None:
            for client in self._clients:
                self._loop.run_until_complete(client.aclose())
            self._loop.run_until_complete(self.engine.dispose())
            self._loop.close()
        else:
            for client in self._clients:
                client.close()
            self.engine.dispose()
        self.admin.close()

    # ── creating ────────────────────────────────────────────────────────────────────────────────────────

    def client(self, url: str | None = None, **settings: Any) -> Any:
        kind: Any = redis.asyncio.Redis if self.asynchronous else redis.Redis
        made = kind.from_url(url or self.url, **settings)
        self._clients.append(made)
        return made

    def config(self, **settings: Any) -> QueueConfig:
        given = {
            "stream_key": self.stream,
            "consumer_group": "group",
            "consumer_name": "one",
            "block_ms": 50,
        } | settings
        return QueueConfig(**given)

    def consumer(self, client: Any = None, **settings: Any) -> Any:
        return self._driven(AsyncQueueConsumer, QueueConsumer, client, settings)

    def queue(self, client: Any = None, **settings: Any) -> Any:
        return self._driven(AsyncRedisStreamsQueue, RedisStreamsQueue, client, settings)

    def _driven(self, asynchronous: Any, sync: Any, client: Any, settings: dict[str, Any]) -> Driven:
        kind = asynchronous if self.asynchronous else sync
        made = Driven(kind(client or self.client(), self.config(**settings)), self._loop)
        self._things.append(made)
        return made

    # ── the database ────────────────────────────────────────────────────────────────────────────────────

    def _make_table(self) -> None:
        plain = create_engine(f"sqlite:///{self._database}")
        with plain.begin() as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS effects (id TEXT PRIMARY KEY)"))
        plain.dispose()
        if self.asynchronous:
            self.engine: Any = create_async_engine(f"sqlite+aiosqlite:///{self._database}")
        else:
            self.engine = create_engine(f"sqlite:///{self._database}")

    def effects(self) -> list[str]:
        """Committed so far, as another connection sees it."""
        plain = create_engine(f"sqlite:///{self._database}")
        with plain.connect() as connection:
            found = [id_ for (id_,) in connection.execute(text("SELECT id FROM effects ORDER BY rowid"))]
        plain.dispose()
        return found

    def handler(
        self,
        insert: TextClause = INSERT,
        *,
        before: Callable[[QueueMessage], object] = lambda _: None,
        after: Callable[[QueueMessage], object] = lambda _: None,
    ) -> Any:
        """Write the payload as an effect in the session, with callbacks before and after it."""

        def handle(message: QueueMessage, session: Any) -> None:
            before(message)
            session.execute(insert, {"id": str(message.payload)})
            after(message)

        async def handle_async(message: QueueMessage, session: Any) -> None:
            before(message)
            await session.execute(insert, {"id": str(message.payload)})
            after(message)

        return handle_async if self.asynchronous else handle

    # ── observing ───────────────────────────────────────────────────────────────────────────────────────

    def add(self, *payloads: str) -> list[str]:
        """Add entries as any other program would."""
        return [self.admin.xadd(self.stream, {"data": payload}).decode() for payload in payloads]

    def pending(self) -> list[str]:
        return [
            entry["message_id"].decode()
            for entry in self.admin.xpending_range(self.stream, "group", "-", "+", 1000)
        ]

    def calls(self, command: str) -> int:
        """How often Redis has received a command, ever."""
        stats = self.admin.info("commandstats").get(f"cmdstat_{command}", {})
        return int(stats.get("calls", 0))


def until(condition: Callable[[], object]) -> None:
    """Wait for something in another thread or process."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


@contextmanager
def later(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Call something in another thread while the test goes on."""
    timer = threading.Timer(seconds, call)
    timer.start()
    try:
        yield
    finally:
        timer.join()
