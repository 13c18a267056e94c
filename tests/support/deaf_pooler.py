"""A pooler in transaction mode, as far as a client can tell: whatever it listens to, no notification arrives, and the
process id that it gets is not that of a server's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOTIFICATION = b"A"
PROCESS = b"K"


class DeafPooler:
    """Forwards connections to the Unix socket of a PostgreSQL, without its notifications. Clients do not use TLS."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                self._sockets += (client, server)
                server.connect(str(self._server))
                self._begin(self._forward, client, server)
                self._begin(self._forward_messages, server, client)

    def _begin(self, forward: Callable[..., None], source: socket.socket, target: socket.socket) -> None:
        def run() -> None:
            with suppress(OSError, EOFError):
                forward(source, target)
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data)

    def _forward_messages(self, source: socket.socket, target: socket.socket) -> None:
        """What the server sends is a byte for the kind, a length that includes itself, and the rest."""
        with source.makefile("rb") as stream:
            while len(head := stream.read(5)) == 5:
                body = stream.read(int.from_bytes(head[1:]) - 4)
                if head[:1] == PROCESS:
                    body = bytes([0x7F, *body[1:]])
                if head[:1] != NOTIFICATION:
                    target.sendall(head + body)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        for each in self._sockets:
            each.close()


@contextmanager
def deaf_pooler(server: Path) -> Iterator[int]:
    """Yields the port of a new one."""
    pooler = DeafPooler(server)
    try:
        yield pooler.port
    finally:
        pooler.close()
