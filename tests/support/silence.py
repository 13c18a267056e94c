"""Servers that accept connections and never say a word."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class SilentServer:
    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.heard = threading.Event()
        """Set when a client has sent something."""
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._connections.append(connection)
                threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while connection.recv(65536):
                self.heard.set()

    def end(self) -> None:
        for each in (self._server, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def silent_server() -> Iterator[SilentServer]:
    server = SilentServer()
    try:
        yield server
    finally:
        server.end()


@contextmanager
def once(happened: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Act in another thread as soon as something has happened, while the block runs."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if happened():
                act()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
