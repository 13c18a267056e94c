"""A boundary's server: hypercorn, because gRPC needs HTTP/2 with trailers and curl speaks HTTP/1, both on one port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypercorn.asyncio import serve
from hypercorn.config import Config

from onceward.boundary.application import Application
from onceward.boundary.service import Boundary
from onceward.task.exceptions import ConfigurationError


def parse_address(listen: str) -> tuple[str, int]:
    """HOST:PORT; port 0 takes a free one."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"--listen must be HOST:PORT, such as 127.0.0.1:7700, not {listen!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


@asynccontextmanager
async def serving(boundary: Boundary, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve while inside; yields the URL."""
    listening = _bound(host, port)
    port = listening.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.accesslog = config.errorlog = None
    config.h2_max_concurrent_streams = 1000
    config.keep_alive_timeout = 300
    config.graceful_timeout = 5
    stop = asyncio.Event()
    task = asyncio.create_task(serve(Application(boundary), config, shutdown_trigger=stop.wait))
    try:
        await _answering(host, port, task)
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        stop.set()
        await task


async def _answering(host: str, port: int, task: asyncio.Task[None]) -> None:
    while True:
        if task.done():
            task.result()
            raise ConfigurationError(f"the server on {host}:{port} ended at once")
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.01)
            continue
        writer.close()
        return


def _bound(host: str, port: int) -> socket.socket:
    """Bound before anything is served: otherwise whoever has the port already would be taken for this server."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}; choose another address, or port 0 for "
            "a free one"
        ) from error
    return made
