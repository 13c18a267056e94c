"""A real boundary for tests: in a thread with its own event loop, or as a process that can be killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.server.server import serving
from onceward.boundary.stores.sqlite import SqliteBoundaryStore

_forking = multiprocessing.get_context("forkserver")


@contextmanager
def boundary_server(directory: Path, settings: BoundarySettings | None = None) -> Iterator[str]:
    """Serve the boundary, and yield its URL."""
    loop = asyncio.new_event_loop()
    ready: asyncio.Queue[str | BaseException] = asyncio.Queue()
    stop = asyncio.Event()

    async def serve() -> None:
        try:
            await _serve(directory, settings, ready.put, stop)
        except BaseException as error:
            await ready.put(error)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="boundary-server")
    thread.start()
    try:
        url = asyncio.run_coroutine_threadsafe(ready.get(), loop).result(30)
        if isinstance(url, BaseException):
            raise url
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def boundary_process(directory: Path) -> Iterator[str]:
    """Serve it in another process, which ends with SIGKILL. Yields its URL."""
    mine, its = _forking.Pipe()
    process = _forking.Process(target=_run, args=(directory, its))
    process.start()
    its.close()
    try:
        yield mine.recv()
    finally:
        process.kill()
        process.join()
        mine.close()


def _run(directory: Path, tell: Connection) -> None:
    async def told(url: str) -> None:
        tell.send(url)

    asyncio.run(_serve(directory, None, told, asyncio.Event()))


async def _serve(
    directory: Path,
    settings: BoundarySettings | None,
    tell: Callable[[str], Awaitable[None]],
    stop: asyncio.Event,
) -> None:
    store = SqliteBoundaryStore(directory)
    try:
        async with serving(Boundary(store, settings)) as url:
            await tell(url)
            await stop.wait()
    finally:
        await store.close()


async def _told(url: str) -> None:
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


if __name__ == "__main__":  # as a child of a test, which reads the URL from standard output
    asyncio.run(_serve(Path(sys.argv[1]), None, _told, asyncio.Event()))
