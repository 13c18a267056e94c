"""A TCP proxy for any server, which delays, cuts, half-closes or swallows what passes, at once or at a chosen point."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

HOLE = 0.15
"""Seconds that a connection in a black hole stays open."""
DELAY = 0.1


class WireFault(StrEnum):
    """What happens to a request and its connection."""

    DELAY = "delay"
    """It arrives late."""
    CUT = "cut"
    """It does not arrive, and the connection is closed."""
    LOST_REPLY = "lost reply"
    """It arrives, and the connection is closed instead of sending the reply."""
    HALF_CLOSE = "half close"
    """It arrives. The client sees the end of the replies at once, while its side stays open until it closes it."""
    BLACK_HOLE = "black hole"
    """It does not arrive, nor does anything after it, in both directions, and the connection stays open for a while."""


class Line:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.fault: WireFault | None = None
        self.closes_at = float("inf")


class TcpProxy:
    """Forwards connections to `target`: host and port, or the path of a Unix socket."""

    def __init__(self, target: tuple[str, int] | Path) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.address = {"host": "127.0.0.1", "port": self.port}
        self.connections = 0
        self.requests = 0
        """Pieces of data that clients have sent since `strike`."""
        self.struck = 0
        """How often a fault has happened."""
        self._fault: tuple[WireFault, int, bytes] | None = None
        self._lines: dict[socket.socket, Line] = {}
        self._over = threading.Event()

    def strike(self, fault: WireFault, at: int = 0, *, on: bytes = b"") -> None:
        """Let this happen once: to the request of this number from now on, the first of which is 0, or to the first
        from there on that contains `on`."""
        self.requests = 0
        self._fault = (fault, at, on)

    def cut(self) -> None:
        """Close every connection. New ones are accepted."""
        there = dict(self._lines)
        for line in there.values():
            line.closes_at = 0.0
        while not there.keys().isdisjoint(self._lines):
            time.sleep(0.005)

    def serve(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listening, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in self._selector.select(0.02):
                    if key.fileobj is self._listening:
                        self._accept()
                    else:
                        self._attend(key.fileobj)  # type: ignore[arg-type]
                now = time.monotonic()
                for line in set(self._lines.values()):
                    if line.closes_at <= now:
                        self._close(line)
            for line in set(self._lines.values()):
                self._close(line)
        self._listening.close()

    def end(self) -> None:
        self._over.set()

    def judge(self, line: Line, data: bytes) -> WireFault | None:
        """Say what happens to a request."""
        number, self.requests = self.requests, self.requests + 1
        if self._fault is None:
            return None
        fault, at, on = self._fault
        if number < at or on not in data:
            return None
        self._fault = None
        return fault

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        try:
            server = self._connect()
        except OSError:
            client.close()
            return
        self.connections += 1
        line = Line(client, server)
        for end in (client, server):
            self._lines[end] = line
            self._selector.register(end, selectors.EVENT_READ)

    def _connect(self) -> socket.socket:
        if isinstance(self._target, Path):
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._target))
            return server
        return socket.create_connection(self._target)

    def _attend(self, source: socket.socket) -> None:
        line = self._lines.get(source)  # None: closed together with its other end, just now
        if line is not None and not self._pass_on(line, source):
            self._close(line)

    def _pass_on(self, line: Line, source: socket.socket) -> bool:
        """Read from one end, and return whether the connection is still of use."""
        try:
            data = source.recv(1 << 20)
            if not data:
                return False
            if source is line.client:
                return self._request(line, data)
            return self._reply(line, data)
        except OSError:
            return False

    def _request(self, line: Line, data: bytes) -> bool:
        fault = self.judge(line, data)
        if fault is not None:
            self.struck += 1
            line.fault = fault
        if fault is WireFault.DELAY:
            time.sleep(DELAY)
        elif fault is WireFault.CUT:
            return False
        elif fault is WireFault.BLACK_HOLE:
            line.closes_at = time.monotonic() + HOLE
        if line.fault is not WireFault.BLACK_HOLE:
            line.server.sendall(data)
        if fault is WireFault.HALF_CLOSE:
            line.client.shutdown(socket.SHUT_WR)
        return True

    def _reply(self, line: Line, data: bytes) -> bool:
        if line.fault is WireFault.LOST_REPLY:
            return False
        if line.fault not in (WireFault.HALF_CLOSE, WireFault.BLACK_HOLE):
            line.client.sendall(data)
        return True

    def _close(self, line: Line) -> None:
        for end in (line.client, line.server):
            if self._lines.pop(end, None) is not None:
                self._selector.unregister(end)
                end.close()


@contextmanager
def served(proxy: TcpProxy) -> Iterator[None]:
    """Run it in a thread."""
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    try:
        yield
    finally:
        proxy.end()
        thread.join()


@contextmanager
def proxy_to(host: str, port: int) -> Iterator[TcpProxy]:
    """A proxy to a server. A host that begins with / is the directory of PostgreSQL's socket."""
    made = TcpProxy(Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else (host, port))
    with served(made):
        yield made
