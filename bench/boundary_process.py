"""A boundary served by another process, so its work does not count as the client's."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from onceward.boundary.boundary import Boundary
from onceward.boundary.server import asgi
from onceward.boundary.server.rpc import BoundaryRpc
from onceward.boundary.server.server import serving
from onceward.boundary.stores.sqlite import SqliteBoundaryStore


@contextmanager
def serve_boundary(place: Path, service: type[BoundaryRpc] = BoundaryRpc) -> Iterator[str]:
    """Serve a boundary, and yield its URL."""
    processes = multiprocessing.get_context("spawn")
    mine, its = processes.Pipe()
    process = processes.Process(target=_serve, args=(place, service, its))
    process.start()
    try:
        yield mine.recv()
    finally:
        process.terminate()
        process.join()


def _serve(place: Path, service: type[BoundaryRpc], parent: Connection) -> None:
    asgi.BoundaryRpc = service  # type: ignore[attr-defined]

    async def main() -> None:
        async with serving(Boundary(SqliteBoundaryStore(place))) as url:
            parent.send(url)
            await asyncio.Event().wait()

    asyncio.run(main())
