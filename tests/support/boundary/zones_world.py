"""Zones on real sockets, linked through proxies that can be cut or fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onceward.boundary import AsyncBoundaryClient, StoredFact, envelope_for, fact_of
from onceward.boundary.artifacts import as_reference
from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.links.manager import Links, LinkSettings
from onceward.boundary.model import Envelope, Fact
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.boundary.wire import stored
from tests.support.boundary.in_process import serving
from tests.support.wait import until_async

DEADLINE = 60.0
MANY = 8
SOON = 0.05
"""Seconds: the longest wait of a test's link, so it resumes right after it heals."""


class Zone:
    """A boundary with its server, and the links that pull into it."""

    def __init__(self, name: str, boundary: Boundary, url: str) -> None:
        self.name = name
        self.boundary = boundary
        self.url = url
        self.links = Links(boundary, name)
        self._pulls: list[LinkSettings] = []
        self._next = 0

    async def pull(self, source: str, **more: Any) -> None:
        settings = {"name": f"from-{len(self._pulls)}", "longest_wait": SOON, **more}
        settings.setdefault("client", partial(AsyncBoundaryClient, source, timeout=1))
        self._pulls.append(LinkSettings(url=source, **settings))
        await self.links.update(self._pulls)

    def message(self, value: Any = None, to_zone: str = "everybody") -> tuple[Envelope, Fact]:
        """Facts, each with its own id."""
        self._next += 1
        envelope = envelope_for(f"{self.name}-{self._next}", from_zone=self.name, to_zone=to_zone)
        return envelope, fact_of(f"batch:{self._next}", "completed", self._next if value is None else value)

    async def say(self, count: int, **more: Any) -> list[str]:
        """Append this many facts of this zone. Returns their ids."""
        messages = [self.message(**more) for _ in range(count)]
        await self.boundary.append_all(messages)
        return [envelope.message_id for envelope, _ in messages]

    async def say_with_artifact(self, content: bytes, key: str) -> str:
        ref = await self.boundary.put("batch-files", key, pieces_of(content), "text/plain")
        (message_id,) = await self.say(1, value=as_reference(ref))
        return message_id

    async def log(self) -> list[StoredFact]:
        return [stored(record) for record in await self.boundary.store.read(0, 100_000)]

    async def ids(self, origin: str | None = None) -> list[str]:
        facts = await self.log()
        return [fact.message_id for fact in facts if origin in (None, fact.envelope.from_zone)]

    async def last(self) -> int:
        return (await self.boundary.store.bounds()).last

    async def has(self, *ids: str) -> bool:
        return set(ids) <= set(await self.ids())

    async def artifact(self, key: str) -> bytes:
        _, pieces = await self.boundary.get("batch-files", key)
        return b"".join([piece async for piece in pieces])

    async def position(self, consumer: str) -> int | None:
        return await self.boundary.store.position(consumer, create=False)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.boundary.metrics.registry.get_sample_value(name, labels)


async def pieces_of(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 1000):
        yield content[at : at + 1000]


class World:
    """What a test creates, closed at its end."""

    def __init__(self, home: Path, opened: AsyncExitStack) -> None:
        self._home = home
        self._opened = opened

    async def zone(self, name: str, settings: BoundarySettings | None = None) -> Zone:
        store = SqliteBoundaryStore(self._home / name)
        self._opened.push_async_callback(store.close)
        boundary = Boundary(store, settings)
        url = await self._opened.enter_async_context(serving(boundary))
        made = Zone(name, boundary, url)
        self._opened.push_async_callback(made.links.close)
        return made

    async def proxy(self, url: str) -> Proxy:
        return await self._opened.enter_async_context(proxy(url))


@asynccontextmanager
async def zones_in(home: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as opened:
        yield World(home, opened)


class Proxy:
    """Passes bytes between a client and a boundary, or does not."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        self.connections = 0
        self._is_cut = False
        self._hears = asyncio.Event()
        self._hears.set()
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        self._is_cut = True
        for writer in self._open:
            writer.transport.abort()

    def fall_silent(self) -> None:
        """Accept bytes but pass nothing on, like a network that loses every packet."""
        self._hears.clear()

    def heal(self) -> None:
        self._is_cut = False
        self._hears.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        address = urlsplit(self.target)
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            behind, onward = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, onward}
        self._open |= both
        try:
            await asyncio.gather(self._carry(reader, onward), self._carry(behind, writer))
        finally:
            self._open -= both
            for end in both:
                end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._hears.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.transport.abort()


@asynccontextmanager
async def proxy(target: str) -> AsyncIterator[Proxy]:
    made = Proxy(target)
    running: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(made.serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def quiet(*zones: Zone) -> None:
    """Wait until every puller has asked every zone a few more times."""
    before = [zone.metric("onceward_boundary_fetch_requests_total") or 0 for zone in zones]
    await until_async(
        lambda: all(
            (zone.metric("onceward_boundary_fetch_requests_total") or 0) >= asked + MANY
            for zone, asked in zip(zones, before, strict=True)
        )
    )
