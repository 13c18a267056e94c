"""A zone as a process: its server, and a link that pulls into it; and an import. Both can be killed with SIGKILL, right
between a durable write and its confirm."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onceward.boundary import AsyncBoundaryClient, Envelope, Fact
from onceward.boundary.boundary import Boundary
from onceward.boundary.bundle import Import, check
from onceward.boundary.links.manager import Links, LinkSettings
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from tests.support.boundary.in_process import serving
from tests.support.fork_server import FORKED

DEADLINE = 60.0


def fill(directory: Path, messages: Sequence[tuple[Envelope, Fact]]) -> None:
    """Facts that a zone has before its process starts."""

    async def append() -> None:
        store = SqliteBoundaryStore(directory)
        await Boundary(store).append_all(messages)
        await store.close()

    asyncio.run(append())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(AsyncBoundaryClient):
    """Dies at this confirm: the facts it would confirm are appended."""

    confirms_left = 0

    async def confirm(self, consumer_name: str, offset: int) -> int:
        Mortal.confirms_left -= 1
        if Mortal.confirms_left == 0:
            die()
        return await super().confirm(consumer_name, offset)


class ZoneProcess:
    def __init__(self, directory: Path, zone: str, source: str | None, die_at: int = 0) -> None:
        mine, its = FORKED.Pipe()
        self._process = FORKED.Process(target=_serve, args=(directory, zone, source, die_at, its))
        self._process.start()
        its.close()
        self.url: str = mine.recv()
        mine.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def peak(self) -> int:
        """Its peak memory, in bytes."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def zone_process(directory: Path, zone: str, source: str | None = None) -> Iterator[ZoneProcess]:
    made = ZoneProcess(directory, zone, source)
    try:
        yield made
    finally:
        made.kill()


def _serve(directory: Path, zone: str, source: str | None, die_at: int, tell: Connection) -> None:
    Mortal.confirms_left = die_at

    async def serve() -> None:
        boundary = Boundary(SqliteBoundaryStore(directory))
        links = Links(boundary, zone)
        if source is not None:
            client = partial(Mortal, source, timeout=5)
            await links.update([LinkSettings(name="link", url=source, longest_wait=0.1, client=client)])
        async with serving(boundary) as url:
            tell.send(url)
            await asyncio.Event().wait()

    asyncio.run(serve())


def import_in_process(directory: Path, bundle: Path, zone: str, die_after: int) -> bool:
    """Whether it finished; it dies after this many appends of a page."""
    process = FORKED.Process(target=_import, args=(directory, bundle, zone, die_after))
    process.start()
    process.join(DEADLINE)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


class MortalBoundary(Boundary):
    appends_left = 0

    async def append_all(self, messages: Sequence[tuple[Envelope, Fact]]) -> Any:
        outcomes = await super().append_all(messages)
        self.appends_left -= 1
        if self.appends_left == 0:
            die()
        return outcomes


def _import(directory: Path, bundle: Path, zone: str, die_after: int) -> None:
    async def take() -> None:
        store = SqliteBoundaryStore(directory)
        boundary = MortalBoundary(store)
        boundary.appends_left = die_after
        with bundle.open("rb") as file:
            check(file)
            await Import(boundary, zone).run(file)
        await store.close()

    asyncio.run(take())
