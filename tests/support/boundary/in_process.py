"""A boundary's application on a port of this process, so a test can reach behind it.

Not Envoy, which runs the application in a process of its own, but uvicorn: without HTTP/2, gRPC and TLS.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from onceward.boundary.boundary import Boundary
from onceward.boundary.server.asgi import Application


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the tests."""
        yield


@asynccontextmanager
async def serving(
    boundary: Boundary, port: int = 0, application: Callable[[Boundary], Any] = Application
) -> AsyncIterator[str]:
    """Yields its URL."""
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listening:
        server = _Server(
            uvicorn.Config(
                application(boundary),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=5,
            )
        )
        task = asyncio.create_task(server.serve([listening]))
        try:
            while not server.started:
                await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
