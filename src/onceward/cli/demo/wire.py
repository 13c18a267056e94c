"""The network between the zones: carries bytes from the warehouse to the shop and back, until it is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

HOST = "127.0.0.1"
CHUNK = 1 << 16

T = TypeVar("T")


class Wire:
    """A TCP proxy in a thread of its own. Carries nothing before `lead_to`."""

    def __init__(self) -> None:
        self.url = ""
        """Its near end: what the warehouse takes for the shop."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lead_to(self, url: str) -> None:
        """Its far end."""
        self._port = urlsplit(url).port

    def cut(self) -> None:
        """Hang up, and on all who come."""
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
            pass  # the end of a connection, one way or another
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
