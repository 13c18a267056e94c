"""A real boundary for tests: in a thread with its own event loop, or as the server that users run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.server.asgi import Application
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from tests.support.boundary.in_process import serving
from tests.support.processes import LoggedProcess, processes

COMMAND = [sys.executable, "-m", "onceward", "boundary"]
DEADLINE = 60.0

Tell = Callable[[str], Awaitable[None]]


@contextmanager
def in_thread(serve: Callable[[Tell, asyncio.Event], Awaitable[None]]) -> Iterator[str]:
    """`serve` reports its URL, then serves until the event is set. Yields the URL, or raises what `serve` raised."""
    loop = asyncio.new_event_loop()
    ready: asyncio.Queue[str | BaseException] = asyncio.Queue()
    stop = asyncio.Event()

    async def run() -> None:
        try:
            await serve(ready.put, stop)
        except BaseException as error:
            await ready.put(error)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name="boundary-server")
    thread.start()
    try:
        url = asyncio.run_coroutine_threadsafe(ready.get(), loop).result(60)
        if isinstance(url, BaseException):
            raise url
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def boundary_server(
    directory: Path,
    settings: BoundarySettings | None = None,
    application: Callable[[Boundary], Any] = Application,
) -> Iterator[str]:
    """Yields its URL."""
    with in_thread(lambda tell, stop: _serve(directory, settings, application, tell, stop)) as url:
        yield url


@contextmanager
def boundary_process(directory: Path, *options: str) -> Iterator[str]:
    """Serve it as `onceward boundary serve` does, until it is killed. Yields its URL."""
    command = [*COMMAND, "serve", "--listen", "127.0.0.1:0"]
    with processes() as start:
        process = start([*command, "--data", str(directory), "--log-level", "error", *options])
        assert process.stdout is not None
        yield process.stdout.readline().strip()


class Served(LoggedProcess):
    """`onceward boundary serve`, with its log and its end."""

    def __init__(
        self, data: Path, *options: str, command: Sequence[str] = COMMAND, env: dict[str, str] | None = None
    ) -> None:
        command = [*command, "serve", "--listen", "127.0.0.1:0", "--data", str(data), *options]
        super().__init__(command, data.parent / f"{data.name}.log", stdout=subprocess.PIPE, env=env)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def end(self, *signals: signal.Signals) -> tuple[int, str]:
        """The exit code, and the rest of stdout."""
        for each in signals:
            self.process.send_signal(each)
        rest, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, rest


@contextmanager
def served(
    data: Path, *options: str, command: Sequence[str] = COMMAND, env: dict[str, str] | None = None
) -> Iterator[Served]:
    made = Served(data, *options, command=command, env=env)
    try:
        yield made
    finally:
        made.kill()


async def _serve(
    directory: Path,
    settings: BoundarySettings | None,
    application: Callable[[Boundary], Any],
    tell: Tell,
    stop: asyncio.Event,
) -> None:
    store = SqliteBoundaryStore(directory)
    try:
        async with serving(Boundary(store, settings), application=application) as url:
            await tell(url)
            await stop.wait()
    finally:
        await store.close()
