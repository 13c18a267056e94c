"""A TCP proxy for Redis that sees the traffic, and cuts or falls silent on demand."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class Proxy:
    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._target = (target.hostname, target.port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}/0"
        self.seen: Counter[str] = Counter()
        self.connections = 0
        self.cut_on: str | None = None
        """A command: the connection that sends it is closed before Redis gets it."""
        self.answers: dict[str, bytes] = {}
        """Replies to commands, sent instead of those of Redis."""
        self.mute = False
        """Redis gets the command; the connection is closed instead of sending its reply."""
        self._over = threading.Event()

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ, None)
            peers: dict[socket.socket, socket.socket] = {}
            while not self._over.is_set():
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._server:
                        self._accept(selector, peers)
                        continue
                    source: socket.socket = key.fileobj  # type: ignore[assignment]
                    if source in peers and not self._forward(source, peers[source], key.data):
                        for end in (source, peers.pop(source)):
                            peers.pop(end, None)
                            selector.unregister(end)
                            end.close()
            for end in peers:
                end.close()
        self._server.close()

    def end(self) -> None:
        self._over.set()

    def _accept(self, selector: selectors.BaseSelector, peers: dict[socket.socket, socket.socket]) -> None:
        client, _ = self._server.accept()
        upstream = socket.create_connection(self._target)
        self.connections += 1
        peers[client], peers[upstream] = upstream, client
        selector.register(client, selectors.EVENT_READ, "client")
        selector.register(upstream, selectors.EVENT_READ, "redis")

    def _forward(self, source: socket.socket, target: socket.socket, who: str) -> bool:
        try:
            data = source.recv(1 << 20)
        except OSError:
            return False
        if not data:
            return False
        if who == "client":
            for name in ("XREADGROUP", "XACK", "XAUTOCLAIM", "XADD", "XGROUP", "XPENDING", "PING"):
                self.seen[name] += data.count(name.encode())
            if self.cut_on is not None and self.cut_on.encode() in data:
                return False
            for name, answer in self.answers.items():
                if name.encode() in data:
                    source.sendall(answer)
                    return True
        elif self.mute:
            return False
        target.sendall(data)
        return True


@contextmanager
def proxy(url: str) -> Iterator[Proxy]:
    made = Proxy(url)
    thread = threading.Thread(target=made.serve)
    thread.start()
    try:
        yield made
    finally:
        made.end()
        thread.join()
