"""A boundary's server: hypercorn, because gRPC needs HTTP/2 with trailers and curl speaks HTTP/1, both on one port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from onceward.boundary.boundary import Boundary
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.server.access import CERTIFICATE, Certificate, Guard, Peers
from onceward.boundary.server.asgi import Application
from onceward.boundary.tls import ServerTls, why_refused
from onceward.errors import ConfigurationError

# Accepts connections, and hands each to hypercorn, which knows the protocols.
#
# Its own loop reports neither a peer's certificate nor why a handshake failed, and keeps one
# TLS context for ever. So the loop is here, and the handshake is awaited before hypercorn sees the connection.


_log = logging.getLogger("onceward.boundary")

GRACE = 5.0
"""Seconds for the calls that run when the server is told to stop."""
HANDSHAKE_SECONDS = 10.0
GOODBYE_SECONDS = 1.0
"""How long a peer may take to say that it has heard the end of TLS."""
AT_ONCE = 100
"""Connections that are accepted before somebody else has a turn."""
AFTER_NO_ROOM = 1.0
"""Seconds until the next try, when no more files can be open."""


class ServerConnections:
    def __init__(
        self,
        listening: socket.socket,
        application: Application,
        tls: ServerTls | None,
        metrics: BoundaryMetrics,
    ) -> None:
        """`listening` does not block, and is closed here."""
        self._listening = listening
        self._application = ASGIWrapper(application)
        self._tls = tls
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._config = Config()
        self._config.accesslog = self._config.errorlog = None
        self._config.h2_max_concurrent_streams = 250  # more are slower, and at 1000 hypercorn loses its way
        self._config.keep_alive_max_requests = (
            2**62
        )  # ending an HTTP/2 connection there cuts off what runs on it
        self._config.keep_alive_timeout = 300
        self._worker = WorkerContext(None)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    async def close(self) -> None:
        """Take no more connections, let running calls end, and cut off what runs too long."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        try:
            await self._worker.terminated.set()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=GRACE)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("no connection can be accepted: %s; the next try is in a second", error)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(AFTER_NO_ROOM, self._accept_again)
                return
            task = self._loop.create_task(self._serve(accepted, f"{address[0]}:{address[1]}"))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:
            self.start()

    async def _serve(self, accepted: socket.socket, address: str) -> None:
        reader = asyncio.StreamReader(loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        try:
            transport = await self._opened(accepted, protocol, address)
        except OSError as error:
            self._metrics.handshake_errors.inc()
            _log.warning(
                "TLS handshake with %s failed: %s", address, why_refused(error), extra={"outcome": "refused"}
            )
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            await TCPServer(self._application, self._loop, self._config, self._worker, {}, reader, writer)
        except Exception:  # noqa: BLE001  of one connection, and told
            _log.exception("the connection of %s failed", address)

    async def _opened(
        self, accepted: socket.socket, protocol: asyncio.StreamReaderProtocol, address: str
    ) -> asyncio.Transport:
        if self._tls is None:
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, accepted)
            return transport
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol,
            accepted,
            ssl=self._tls.context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=GOODBYE_SECONDS,
        )
        shown = transport.get_extra_info("peercert")
        if not shown:  # it was cut off during the handshake, and nobody has told us
            transport.abort()
            raise ConnectionResetError
        # Whose connection it is stands in the context of this task, and of all tasks that are started by it.
        CERTIFICATE.set(Certificate(shown, address))
        return transport


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
    connections = ServerConnections(listening, Application(boundary, guard), tls, boundary.metrics)
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
