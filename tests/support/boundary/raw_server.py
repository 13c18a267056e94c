"""A server that answers with given bytes, and clients of both modes for it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import takewhile
from typing import Any, Self

from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.v1 import boundary_pb as pb

CONFIRMED = bytes(pb.ConfirmReceiptResponse(cursor_advanced_to=7).to_binary())
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/proto\r\n"


def with_length(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


class Closing(bytes):
    """The connection ends with it."""


def to_the_end(body: bytes) -> Closing:
    """Without a length: the end of the connection is that of the body."""
    return Closing(HEAD + b"\r\n" + body)


class Server:
    """Answers each request with the next of these bytes; None, and one that is `Closing`, end the connection."""

    def __init__(self, answers: Iterable[bytes | None]) -> None:
        self._answers = iter(answers)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.requests: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.ended = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self.connections:
            each.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                plug, _ = self._listening.accept()
                self.connections.append(plug)
                threading.Thread(target=self._answer, args=(plug,), daemon=True).start()

    def _answer(self, plug: socket.socket) -> None:
        with suppress(OSError), plug.makefile("rb") as file:
            while head := b"".join(takewhile(lambda line: line.strip(), file)):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + file.read(length))
                answer = next(self._answers)
                if answer is not None:
                    plug.sendall(answer)
                if answer is None or isinstance(answer, Closing):
                    plug.shutdown(socket.SHUT_RDWR)
                    break
        self.ended += 1


Client = Callable[..., Any]
"""Makes a client of this mode, whose calls block."""


class Blocked:
    """An asyncio client whose calls block, in an event loop that runs only for them."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._port: Any
        self._client = self._runner.run(self._make(url, options))
        self._port = self._client._port

    async def _make(self, url: str, options: dict[str, Any]) -> AsyncBoundaryClient:
        return AsyncBoundaryClient(url, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._client, name)
        return lambda *args, **options: self._runner.run(function(*args, **options))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


MODES = {"threads": BoundaryClient, "asyncio": Blocked}
