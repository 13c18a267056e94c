"""Many callers of one client, in threads or in asyncio, against a server that a test can hold up."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.boundary import Boundary
from onceward.boundary.server.asgi import Application
from tests.support.wait import until

MANY = 64


class HeldApplication(Application):
    """Notes the name of each call, and answers none while it is held."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__(boundary)
        self.calls: list[str] = []
        self.release = threading.Event()
        self.release.set()
        self.hold_only = sys.maxsize
        """Later calls are answered."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            self.calls.append(scope["path"].rpartition("/")[2])
            number = len(self.calls)
            while not self.release.is_set() and number <= self.hold_only:
                await asyncio.sleep(0.002)
        await super().__call__(scope, receive, send)


class OlderApplication(HeldApplication):
    """A boundary from before AppendFacts."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"].replace("AppendFacts", "AppendMany")
        await super().__call__({**scope, "path": path}, receive, send)


class Callers:
    """`append` returns at once, with the future of its outcome."""

    def __init__(self, client: Any, pool: ThreadPoolExecutor | None, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self._pool = pool
        self._loop = loop

    def call(self, method: str, *arguments: Any, **more: Any) -> Future[Any]:
        function = getattr(self.client, method)
        if self._pool is not None:
            return self._pool.submit(function, *arguments, **more)
        return asyncio.run_coroutine_threadsafe(function(*arguments, **more), self._loop)

    def append(self, *message: Any) -> Future[Any]:
        return self.call("append", *message)

    @property
    def waiting(self) -> int:
        """How many facts wait for a call to end."""
        loads = self.client._calls._loads
        line = loads._line if self._pool is not None else loads._lines.get(self._loop)
        return 0 if line is None else len(line.waiting)

    def append_behind(self, server: HeldApplication, first: Any, others: list[Any]) -> list[Future[Any]]:
        """Append `first`, and while the server holds its call, the others. None is answered yet."""
        server.release.clear()
        calls = len(server.calls)
        futures = [self.append(*first)]
        until(lambda: len(server.calls) > calls)
        for number, other in enumerate(others, 1):
            futures.append(self.append(*other))
            until(lambda number=number: self.waiting == number)  # type: ignore[misc]
        return futures


@contextmanager
def callers_of(url: str, mode: str, **options: Any) -> Iterator[Callers]:
    loop = asyncio.new_event_loop()
    runner = threading.Thread(target=loop.run_forever)
    runner.start()

    async def opened() -> AsyncBoundaryClient:
        return AsyncBoundaryClient(url, **options)

    try:
        if mode == "threads":
            with BoundaryClient(url, **options) as client, ThreadPoolExecutor(MANY) as pool:
                yield Callers(client, pool, loop)
        else:
            made = asyncio.run_coroutine_threadsafe(opened(), loop).result()
            yield Callers(made, None, loop)
            asyncio.run_coroutine_threadsafe(made.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        runner.join()
        loop.close()
