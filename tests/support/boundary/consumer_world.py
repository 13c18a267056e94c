"""A real boundary on a real socket, and clients and consumers of both modes behind the same calls.

The server runs in a thread of the test's process, so a test can see the calls in their order, and make one fail.
Everything else a test does with `admin`, a plain client.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceward._sync import run_blocking
from onceward.boundary import (
    AsyncBoundaryClient,
    AsyncBoundaryConsumer,
    BoundaryClient,
    BoundaryConsumer,
    envelope_for,
    fact_of,
)
from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.errors import Unavailable
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from tests.support.boundary.in_process import serving
from tests.support.driven import Driven

if TYPE_CHECKING:
    from tests.support.databases import Database

NAME = "plant-a-receiver"


class Watched(Boundary):
    """Records every call, and fails those that the test names."""

    def __init__(self, store: Any, settings: BoundarySettings | None, server: Server) -> None:
        super().__init__(store, settings)
        self._server = server

    async def _watched(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        server = self._server
        server.calls.append((name, *args[:2]))
        server.on_call(name)
        if server.failing[name]:
            raise server.failing[name].pop(0)
        answer = await call(*args)
        if server.losing[name]:
            raise server.losing[name].pop(0)
        return answer

    async def append(self, *args: Any) -> Any:
        return await self._watched("append", super().append, args)

    async def fetch(self, *args: Any) -> Any:
        return await self._watched("fetch", super().fetch, args)

    async def confirm(self, *args: Any) -> Any:
        return await self._watched("confirm", super().confirm, args)

    async def put(self, *args: Any) -> Any:
        return await self._watched("put", super().put, args)

    async def get(self, *args: Any) -> Any:
        ref, chunks = await self._watched("get", super().get, args)
        return ref, self._breaking(chunks)

    async def _breaking(self, chunks: Any) -> Any:
        after, self._server.break_after = self._server.break_after, 0
        number = 0
        async with aclosing(chunks):
            async for chunk in chunks:
                number += 1
                if number == after:
                    raise Unavailable("the disk is away")
                yield chunk


class Server:
    """Starts and stops a server, always at the same address and with the same data."""

    def __init__(self, directory: Path, settings: BoundarySettings | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        """Name and first arguments."""
        self.failing: dict[str, list[Exception]] = defaultdict(list)
        """What the next calls of a method raise instead of doing anything."""
        self.losing: dict[str, list[Exception]] = defaultdict(list)
        """What they raise after doing their work: their answer is lost."""
        self.on_call: Callable[[str], object] = lambda _: None
        self.break_after = 0
        """The first piece of the next object that is no longer sent."""
        self.directory = directory
        self._settings = settings
        self._port = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self._thread.start()
        assert started.wait(30)

    def stop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)
            self._thread = None

    def ask(self, coroutine: Any) -> Any:
        """Run a method of the store on the server's own event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def count(self, name: str) -> int:
        return self.names().count(name)

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.store = SqliteBoundaryStore(self.directory)
        try:
            async with serving(Watched(self.store, self._settings, self), port=self._port) as self.url:
                self._port = int(self.url.rpartition(":")[2])
                started.set()
                await self._stop.wait()
        finally:
            await self.store.close()


class Awaited:
    """A session whose methods are awaited in both modes, so each handler is written once."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)

        async def call(*args: Any, **more: Any) -> Any:
            result = method(*args, **more)
            return await result if inspect.isawaitable(result) else result

        return call


class BoundaryWorld:
    def __init__(self, database: Database, directory: Path, settings: BoundarySettings | None = None) -> None:
        self.database = database
        self.asynchronous = database.asynchronous
        self.server = Server(directory / "boundary", settings)
        self.waits: list[float] = []
        """How long the clients waited between attempts; no time passes."""
        self.on_wait: Callable[[], object] = lambda: None
        self._clients: list[Driven] = []

    def __enter__(self) -> BoundaryWorld:
        self.server.start()
        self.admin = BoundaryClient(self.server.url)
        self.client = self.new_client()
        self.database.do("CREATE TABLE effects (number INTEGER, at_offset BIGINT)")
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self.admin.close()
        self.server.stop()

    # ── creating ────────────────────────────────────────────────────────────────────────────────────────

    def new_client(self, url: str | None = None, **settings: Any) -> Driven:
        kind: Any = AsyncBoundaryClient if self.asynchronous else BoundaryClient
        settings = {"sleep": self._sleep_async if self.asynchronous else self._sleep} | settings
        made = Driven(kind(url or self.server.url, **settings), self.database.run)
        self._clients.append(made)
        return made

    def consumer(self, name: str = NAME, limit: int = 100, **settings: Any) -> Driven:
        kind: Any = AsyncBoundaryConsumer if self.asynchronous else BoundaryConsumer
        return Driven(kind(self.client.thing, name, limit, **settings), self.database.run)

    def handler(self, work: Callable[[Any, Awaited], Any]) -> Any:
        """Turn `async def work(fact, session)` into a handler of this mode."""

        def handle(fact: Any, session: Any) -> Any:
            return run_blocking(work(fact, Awaited(session)))

        async def handle_async(fact: Any, session: Any) -> Any:
            return await work(fact, Awaited(session))

        return handle_async if self.asynchronous else handle

    def consume(self, work: Callable[[Any, Awaited], Any], **settings: Any) -> None:
        """Run a new consumer until there is nothing new."""
        self.consumer(**settings).run(self.handler(work), self.database.default, drain=True)

    def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.on_wait()

    async def _sleep_async(self, seconds: float) -> None:
        await asyncio.to_thread(self._sleep, seconds)

    def in_session(self, call: Callable[[Any], Any]) -> Any:
        """What `call(session)` returns, in its own transaction."""
        with self.database.session() as session:
            result = call(getattr(session, "_session", session))
            return self.database.run(result) if inspect.isawaitable(result) else result

    # ── facts and their effects ─────────────────────────────────────────────────────────────────────────

    def append(self, *numbers: int, **envelope: Any) -> None:
        for number in numbers:
            made = envelope_for(f"message-{number}", from_zone="plant-a", to_zone="hq", **envelope)
            self.admin.append(made, fact_of(f"batch:B{number}", "completed", {"number": number}))

    def effects(self) -> list[int]:
        """Committed so far, as another transaction sees it, including duplicates."""
        with self.database.session() as session:
            return [
                row["number"] for row in session.fetch_all("SELECT number FROM effects ORDER BY at_offset")
            ]

    def cursor(self, name: str = NAME) -> int | None:
        return self.server.ask(self.server.store.position(name, create=False))  # type: ignore[no-any-return]


async def book(fact: Any, session: Awaited) -> None:
    """A handler whose effect doubles if it is applied twice."""
    await session.execute(
        "INSERT INTO effects (number, at_offset) VALUES (:number, :at)",
        {"number": fact.fact.object["number"], "at": fact.offset},
    )


@contextmanager
def meanwhile(call: Callable[[], object]) -> Iterator[None]:
    """Call something in another thread while the test goes on."""
    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        thread.join()
