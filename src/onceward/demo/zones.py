"""The two boundaries, each a real `onceward boundary serve` with its own store, and the network between them.

The warehouse pulls from the shop.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Coroutine
from functools import cached_property
from pathlib import Path
from select import select
from threading import Thread
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import msgspec

from onceward.boundary import BoundaryClient
from onceward.demo.crew import DemoProcess, ProcessDied, ProcessGroup
from onceward.demo.setup import SHOP, WAREHOUSE, Setup

SERVE = [
    sys.executable,
    "-m",
    "onceward",
    "boundary",
    "serve",
    "--listen",
    "127.0.0.1:0",
    "--ends-with-stdin",
]
LINKED = """\
zone = "{zone}"
store = "{zone}"

[[links]]
name = "{source}"
url = "{url}"
from_zones = ["{source}"]
"""
AUDITOR = "auditor"
"""The consumer name with which the demo itself reads the logs at the end."""
PAGE = 1000
START_PATIENCE = 60.0
ANSWER_PATIENCE = 10.0
HOST = "127.0.0.1"
CHUNK = 1 << 16

T = TypeVar("T")

_open = build_opener(ProxyHandler({})).open  # on this machine, never through a proxy


class ConsumerCursor(msgspec.Struct):
    name: str
    offset: int


class Stats(msgspec.Struct):
    """The statistics of a boundary."""

    last: int
    """The offset of the last fact; offsets have no gaps."""
    consumers: list[ConsumerCursor]

    def confirmed(self, consumer: str) -> int:
        return next((each.offset for each in self.consumers if each.name == consumer), 0)


class Zone(DemoProcess):
    def __init__(self, setup: Setup, name: str, *arguments: str) -> None:
        super().__init__(name, [*SERVE, *arguments], setup.log(name))

    @cached_property
    def url(self) -> str:
        """Its URL; waits until it serves."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select([stdout], [], [], START_PATIENCE)[0]:
            raise ProcessDied(f"{self.name} did not serve within {START_PATIENCE:g} s")
        line = stdout.readline().decode().strip()
        if not line:
            self._process.wait()
            raise self.died()
        return line

    def stats(self) -> Stats:
        return msgspec.json.decode(self._page("/stats"), type=Stats)

    def duplicates(self) -> int:
        """Duplicate appends, as the server counts them."""
        found = re.search(
            rb"^onceward_boundary_append_duplicates_total (\S+)$", self._page("/metrics"), re.MULTILINE
        )
        return 0 if found is None else int(float(found[1]))

    def ids(self) -> list[str]:
        """The ids of all facts, in the order of the log."""
        ids: list[str] = []
        with BoundaryClient(self.url) as client:
            while facts := client.fetch(AUDITOR, PAGE).facts:
                ids += [fact.message_id for fact in facts]
                client.confirm(AUDITOR, facts[-1].offset)
        return ids

    def _page(self, path: str) -> bytes:
        with _open(f"{self.url}{path}", timeout=ANSWER_PATIENCE) as answer:
            page: bytes = answer.read()
            return page


class Zones(ProcessGroup[Zone]):
    """Both zones."""

    def __init__(self, setup: Setup, way_to_the_shop: str) -> None:
        super().__init__()
        config = Path(setup.folder) / f"{WAREHOUSE}.toml"
        config.write_text(LINKED.format(zone=WAREHOUSE, source=SHOP, url=way_to_the_shop), "utf-8")
        try:
            self.shop = self._add(Zone(setup, SHOP, "--data", str(Path(setup.folder) / SHOP)))
            self.warehouse = self._add(Zone(setup, WAREHOUSE, "--config", str(config)))
        except BaseException:
            self.__exit__()
            raise

    def _add(self, zone: Zone) -> Zone:
        self.children.append(zone)
        return zone


class Wire:
    """The network between the zones: a TCP proxy in its own thread, which can be cut. Needs `lead_to` first."""

    def __init__(self) -> None:
        self.url = ""
        """Its near end, which the warehouse uses as the shop."""
        self.is_up = True
        self._port: int | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="wire", daemon=True)
        self._ends: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._connect, HOST, 0))
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lead_to(self, url: str) -> None:
        """Set its far end."""
        self._port = urlsplit(url).port

    def cut(self) -> None:
        """Drop all connections, and new ones until `heal`."""
        self.is_up = False
        self._run(self._hang_up())

    def heal(self) -> None:
        self.is_up = True

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _hang_up(self) -> None:
        for end in self._ends:
            end.transport.abort()

    async def _close(self) -> None:
        self.is_up = False
        self._server.close()
        await self._hang_up()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _connect(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        self._ends.add(near_out)
        far_out: asyncio.StreamWriter | None = None
        try:
            if self.is_up and self._port is not None:
                far_in, far_out = await asyncio.open_connection(HOST, self._port)
                self._ends.add(far_out)
                if self.is_up:
                    await asyncio.gather(_carry(near_in, far_out), _carry(far_in, near_out))
        except (OSError, asyncio.CancelledError):
            pass  # the connection ended, one way or another
        finally:
            for end in (near_out, far_out):
                if end is not None:
                    self._ends.discard(end)
                    end.transport.abort()
            self._carrying.discard(task)


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
    finally:
        target.transport.abort()
