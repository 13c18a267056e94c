"""A boundary's server: hypercorn, because gRPC needs HTTP/2 with trailers and curl speaks HTTP/1, both on one port.

Hypercorn's own accept loop reports neither a peer's certificate nor why a handshake failed, and never replaces its TLS
context. So the loop is here, and the handshake is awaited before hypercorn gets the connection.
"""

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
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

GRACE = 5.0
"""Seconds that running calls get when the server stops."""
HANDSHAKE_SECONDS = 10.0
GOODBYE_SECONDS = 1.0
"""How long a peer may take to acknowledge the end of TLS."""
AT_ONCE = 100
"""Connections accepted before other tasks get a turn."""
AFTER_NO_ROOM = 1.0
"""Seconds until the next try, when no more files can be opened."""
BACKLOG = 1024


class ServerConnections:
    """Accepts connections, and passes each to hypercorn, which speaks the protocols."""

    def __init__(
        self,
        listening: socket.socket,
        application: Application,
        tls: ServerTls | None,
        metrics: BoundaryMetrics,
    ) -> None:
        """`listening` must not block. `close` closes it."""
        self._listening = listening
        self._application = ASGIWrapper(application)
        self._tls = tls
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._config = Config()
        self._config.accesslog = self._config.errorlog = None
        self._config.h2_max_concurrent_streams = 250  # more are slower, and at 1000 hypercorn fails
        # Ending an HTTP/2 connection at a limit would cut off the calls running on it.
        self._config.keep_alive_max_requests = 2**62
        self._config.keep_alive_timeout = 300
        self._worker = WorkerContext(None)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    async def close(self) -> None:
        """Accept no more connections, let running calls end, and cancel those that take too long."""
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
                _log.error("cannot accept connections: %s; will retry in a second", error)
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
            transport = await self._open(accepted, protocol, address)
        except OSError as error:
            self._metrics.handshake_errors.inc()
            _log.warning(
                "TLS handshake with %s failed: %s", address, why_refused(error), extra={"outcome": "refused"}
            )
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            await TCPServer(self._application, self._loop, self._config, self._worker, {}, reader, writer)
        except Exception:  # noqa: BLE001  only this connection is affected
            _log.exception("the connection from %s failed", address)

    async def _open(
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
        if not shown:  # it was cut off during the handshake, without an error
            transport.abort()
            raise ConnectionResetError
        # The context of this task, and of all tasks that it starts, identifies the peer.
        CERTIFICATE.set(Certificate(shown, address))
        return transport


def parse_address(listen: str, name: str = "--listen") -> tuple[str, int]:
    """Split HOST:PORT. Port 0 takes a free one."""
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
    """Serve while inside; yield the URL. With `tls` only `peers` are served, without it everyone."""
    if peers is not None and tls is None:
        raise ConfigurationError("peers are identified by their certificates: they need tls")
    guard = None if tls is None else Guard(peers or Peers(), boundary.metrics)
    listening = _bind(host, port)
    port = listening.getsockname()[1]
    connections = ServerConnections(listening, Application(boundary, guard), tls, boundary.metrics)
    connections.start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    finally:
        await connections.close()


def _bind(host: str, port: int) -> socket.socket:
    """Bind before anything is served: otherwise a process that has the port already would be taken for this server."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Without `protocol`, asyncio leaves Nagle's algorithm on, which delays small answers.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address, or port 0 for a free "
            "one"
        ) from error
    return listening
