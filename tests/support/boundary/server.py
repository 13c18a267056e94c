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
def boundary_server(directory: Path, settings: BoundarySettings | None = None) -> Iterator[str]:
    """Yields its URL."""
    with in_thread(lambda tell, stop: _serve(directory, settings, tell, stop)) as url:
        yield url


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
    async def reported(url: str) -> None:
        tell.send(url)

    asyncio.run(_serve(directory, None, reported, asyncio.Event()))


async def _serve(
    directory: Path,
    settings: BoundarySettings | None,
    tell: Tell,
    stop: asyncio.Event,
) -> None:
    store = SqliteBoundaryStore(directory)
    try:
        async with serving(Boundary(store, settings)) as url:
            await tell(url)
            await stop.wait()
    finally:
        await store.close()


async def _reported(url: str) -> None:
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


if __name__ == "__main__":  # as a child of a test, which reads the URL from standard output
    asyncio.run(_serve(Path(sys.argv[1]), None, _reported, asyncio.Event()))
