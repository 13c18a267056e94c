"""A proxy for Redis, which knows its commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.support.proxy import Line, TcpProxy, WireFault, served

COMMANDS = ("XREADGROUP", "XACK", "XAUTOCLAIM", "XADD", "XGROUP", "XPENDING", "PING", "EVALSHA")


class Proxy(TcpProxy):
    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        super().__init__((target.hostname or "127.0.0.1", target.port or 6379))
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.seen: Counter[str] = Counter()
        self.cut_on: str | None = None
        """A command: the connection that sends it is closed before Redis gets it."""
        self.answers: dict[str, bytes] = {}
        """Replies to commands, sent instead of those of Redis."""
        self.mute = False
        """Redis gets the command; the connection is closed instead of sending its reply."""

    def judge(self, line: Line, data: bytes) -> WireFault | None:
        for name in COMMANDS:
            self.seen[name] += data.count(name.encode())
        if self.cut_on is not None and self.cut_on.encode() in data:
            return WireFault.CUT
        return super().judge(line, data)

    def _request(self, line: Line, data: bytes) -> bool:
        for name, answer in self.answers.items():
            if name.encode() in data:
                self.judge(line, data)
                line.client.sendall(answer)
                return True
        return super()._request(line, data)

    def _reply(self, line: Line, data: bytes) -> bool:
        return not self.mute and super()._reply(line, data)


@contextmanager
def proxy(url: str) -> Iterator[Proxy]:
    made = Proxy(url)
    with served(made):
        yield made
