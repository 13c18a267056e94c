"""Both modes of the queue behind the same calls, which are made, or awaited on the world's event loop.

Everything else a test does to Redis with `admin`, a plain client.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
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
from tests.support.driven import Driven

_numbers = itertools.count()
INSERT = text("INSERT INTO effects (id) VALUES (:id)")


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
        made = Driven(kind(client or self.client(), self.config(**settings)), self._run)
        self._things.append(made)
        return made

    def _run(self, awaitable: Any) -> Any:
        assert self._loop is not None
        return self._loop.run_until_complete(awaitable)

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


@contextmanager
def later(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Call something in another thread while the test goes on."""
    timer = threading.Timer(seconds, call)
    timer.start()
    try:
        yield
    finally:
        timer.join()
