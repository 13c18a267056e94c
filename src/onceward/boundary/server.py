"""A boundary's server: hypercorn, because gRPC needs HTTP/2 with trailers and curl speaks HTTP/1, both on one port."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from onceward.boundary.application import Application
from onceward.boundary.connections import Connections
from onceward.boundary.guard import Guard
from onceward.boundary.peers import Peers
from onceward.boundary.service import Boundary
from onceward.boundary.tls import ServerTls
from onceward.errors import ConfigurationError

BACKLOG = 1024


def parse_address(listen: str, name: str = "--listen") -> tuple[str, int]:
    """HOST:PORT; port 0 takes a free one."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{name} must be HOST:PORT, such as 127.0.0.1:7700, not {listen!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


@asynccontextmanager
async def serving(
    boundary: Boundary,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: ServerTls | None = None,
    peers: Peers | None = None,
) -> AsyncIterator[str]:
    """Serve while inside; yields the URL. With `tls` only `peers` are served, without it whoever comes."""
    if peers is not None and tls is None:
        raise ConfigurationError("peers are known by their certificates: they need tls")
    guard = None if tls is None else Guard(peers or Peers(), boundary.metrics)
    listening = _bound(host, port)
    port = listening.getsockname()[1]
    connections = Connections(listening, Application(boundary, guard), tls, boundary.metrics)
    connections.start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    finally:
        await connections.close()


def _bound(host: str, port: int) -> socket.socket:
    """Bound before anything is served: otherwise whoever has the port already would be taken for this server."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)  # without it asyncio leaves small answers to Nagle
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(BACKLOG)
            made.setblocking(False)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}; choose another address, or port 0 for "
            "a free one"
        ) from error
    return made
