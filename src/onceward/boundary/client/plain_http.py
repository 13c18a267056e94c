"""Unary calls over plain HTTP/1.1, in the event loop or the thread of their caller.

The library makes a call in threads of its own, and the ways to them and back take longer than all else that a client
does for a call. It still says what an answer means that is not simply the message, and streams, TLS and proxies are
left to it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import select
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from pyqwest import Headers, SyncClient, SyncRequest, SyncResponse

from onceward.boundary.client.gateway_pages import retryable_pages
from onceward.boundary.client.http_answer import BadAnswer, HttpAnswer
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.v1.boundary_connect import BoundaryService, BoundaryServiceClientSync

MOST_IDLE = 64
"""Connections that are kept open for the next calls."""
IDLE_SECONDS = 60.0
"""How long. A server closes them after minutes."""
CONNECT_SECONDS = 30.0
NEXT_ADDRESS = 3.0
"""Seconds after which the next address of a name is tried."""
KEEPALIVE = 30
"""Seconds without a byte after which the system asks whether the server is still there."""
PIECE = 256 * 1024
"""Bytes that are read at once."""
NOT_CONNECTED = "tcp connect error"
"""As the library says."""
ENDED = "connection closed before the answer was complete"

ANSWERS: dict[str, Any] = {
    "append_fact": pb.AppendFactResponse,
    "append_facts": pb.AppendFactsResponse,
    "fetch_facts": pb.FetchFactsResponse,
    "confirm_receipt": pb.ConfirmReceiptResponse,
    "remove_consumer": pb.RemoveConsumerResponse,
    "put_object": pb.PutObjectResponse,
}
"""What each call answers. Those that are not here are left to the library."""


def may_call_plainly(url: str) -> bool:
    """Return whether calls to this URL need nothing that only the library can do."""
    place = urlsplit(url)
    if place.scheme != "http" or not url.isascii() or "@" in place.netloc or not place.hostname:
        return False
    proxies = getproxies()
    return not ("http" in proxies or "all" in proxies) or bool(proxy_bypass(place.hostname))


class CallTarget:
    """Where calls go, how they are written, and what their answers mean."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._url = url
        self.address = (place.hostname or "", place.port or 80)
        self._heads = {
            method: (
                f"POST {place.path}/{BoundaryService.desc().type_name}/{_camel(method)} HTTP/1.1\r\n"
                f"host: {place.netloc}\r\nuser-agent: onceward\r\naccept: */*\r\n"
                "content-type: application/proto\r\nconnect-protocol-version: 1\r\n"
            )
            for method in ANSWERS
        }

    def encode(self, method: str, request: Any, timeout_ms: int | None) -> bytes:
        body = bytes(request.to_binary())
        limit = "" if timeout_ms is None else f"connect-timeout-ms: {timeout_ms}\r\n"
        return f"{self._heads[method]}{limit}content-length: {len(body)}\r\n\r\n".encode("ascii") + body

    def decode(self, method: str, request: Any, answer: HttpAnswer) -> Any:
        if answer.status == 200 and answer.has("content-type", "application/proto"):
            with suppress(Exception):  # the library says what is wrong
                return ANSWERS[method].from_binary(answer.body)
        library = BoundaryServiceClientSync(
            self._url, send_compression=None, accept_compression=(), http_client=SyncClient(Heard(answer))
        )
        with retryable_pages():
            return getattr(library, method)(request)


class Heard:
    """Tells the library an answer that is here already."""

    def __init__(self, answer: HttpAnswer) -> None:
        self._answer = answer

    def execute_sync(self, _: SyncRequest) -> SyncResponse:
        answer = self._answer
        return SyncResponse(status=answer.status, headers=Headers(answer.headers), content=answer.body)


class Use:
    """When a connection was used, and whether it can be again."""

    def __init__(self, plug: Any) -> None:
        self._look = select.poll()
        self._look.register(plug.fileno(), select.POLLIN)
        self._at = time.monotonic()

    def note(self) -> None:
        self._at = time.monotonic()

    def may_repeat(self) -> bool:
        """Look each time: what arrives while nobody has asked is the connection's end."""
        return time.monotonic() - self._at < IDLE_SECONDS and not self._look.poll(0)


# ── asyncio ─────────────────────────────────────────────────────────────────────────────────────────────


class AsyncPlainCalls:
    """For asyncio. Each event loop has its connections."""

    def __init__(self, url: str) -> None:
        self._target = CallTarget(url)
        self._idle: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncConnection]] = WeakKeyDictionary()
        self._closed = False

    async def call(self, method: str, request: Any, timeout_ms: int | None) -> Any:
        sent = self._target.encode(method, request, timeout_ms)
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                connection = self._reusable() or await self._connect()
                answer = await connection.ask(sent)
        except TimeoutError as error:
            raise ConnectError(Code.DEADLINE_EXCEEDED, "Request timed out") from error
        except (OSError, BadAnswer) as error:
            raise ConnectError(Code.UNAVAILABLE, str(error)) from error
        self._keep(connection, answer)
        return self._target.decode(method, request, answer)

    def close(self) -> None:
        self._closed = True
        for connections in list(self._idle.values()):
            for each in connections:
                each.close()
        self._idle.clear()

    def _reusable(self) -> AsyncConnection | None:
        idle = self._idle.get(asyncio.get_running_loop(), [])
        while idle:
            connection = idle.pop()
            if connection.is_usable():
                return connection
            connection.close()
        return None

    def _keep(self, connection: AsyncConnection, answer: HttpAnswer) -> None:
        if self._closed or not answer.keeps_open:
            connection.close()
            return
        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        idle.append(connection)
        if len(idle) > MOST_IDLE:
            idle.pop(0).close()

    async def _connect(self) -> AsyncConnection:
        try:
            async with asyncio.timeout(CONNECT_SECONDS) as limit:
                return AsyncConnection(await self._open())
        except TimeoutError:
            if not limit.expired():  # by the system
                raise ConnectionError(f"{NOT_CONNECTED}: {os.strerror(errno.ETIMEDOUT)}") from None
            raise ConnectionError("no connection in time") from None
        except OSError as error:
            raise ConnectionError(f"{NOT_CONNECTED}: {_reason(error)}") from error

    async def _open(self) -> socket.socket:
        """Connect to the first address that answers."""
        loop = asyncio.get_running_loop()
        *others, last = await loop.getaddrinfo(*self._target.address, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in others:
            with suppress(OSError):
                async with asyncio.timeout(NEXT_ADDRESS):
                    return await _connect_plug(socket.socket(family, kind, protocol), address)
        return await _connect_plug(socket.socket(*last[:3]), last[4])


async def _connect_plug(plug: socket.socket, address: Any) -> socket.socket:
    try:
        plug.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plug, address)
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(plug)
    except BaseException:
        plug.close()
        raise
    return plug


class PlainConnection:
    """Carries one call at a time. Not a transport, which would have to be closed before its event loop is."""

    def __init__(self, plug: socket.socket) -> None:
        self._plug = plug
        self._used = Use(plug)

    def __del__(self) -> None:
        self.close()

    def is_usable(self) -> bool:
        return self._used.may_repeat()

    def close(self) -> None:
        self._plug.close()


class AsyncConnection(PlainConnection):
    async def ask(self, request: bytes) -> HttpAnswer:
        loop, answer = asyncio.get_running_loop(), HttpAnswer()
        try:
            await loop.sock_sendall(self._plug, request)
            while not answer.take(data := await loop.sock_recv(self._plug, PIECE)):
                if not data:
                    if answer.ends_here():
                        break
                    raise ConnectionError(ENDED)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno:
                raise ConnectionError(_reason(error)) from error
            raise
        self._used.note()
        return answer


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────────


class BlockingPlainCalls:
    """For threads."""

    def __init__(self, url: str) -> None:
        self._target = CallTarget(url)
        self._idle: list[BlockingConnection] = []
        self._closed = False
        self._process = os.getpid()

    def __del__(self) -> None:
        self.close()

    def call(self, method: str, request: Any, timeout_ms: int | None) -> Any:
        sent = self._target.encode(method, request, timeout_ms)
        until = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        try:
            connection = self._reusable() or self._connect(until)
            answer = connection.ask(sent, until)
        except TimeoutError as error:
            raise ConnectError(Code.DEADLINE_EXCEEDED, "Request timed out") from error
        except (OSError, BadAnswer) as error:
            raise ConnectError(Code.UNAVAILABLE, str(error)) from error
        if answer.keeps_open and not self._closed and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        return self._target.decode(method, request, answer)

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    def _reusable(self) -> BlockingConnection | None:
        if self._process != os.getpid():  # a forked child must not use the connections of its parent
            self._drop()
            self._process = os.getpid()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_usable():
                return connection
            connection.close()

    def _connect(self, until: float | None) -> BlockingConnection:
        try:
            plug = socket.create_connection(
                self._target.address, CONNECT_SECONDS if until is None else min(CONNECT_SECONDS, _left(until))
            )
        except TimeoutError:
            if until is not None and until <= time.monotonic():
                raise
            raise ConnectionError("no connection in time") from None
        except OSError as error:
            raise ConnectionError(f"{NOT_CONNECTED}: {_reason(error)}") from error
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(plug)
        return BlockingConnection(plug)


class BlockingConnection(PlainConnection):
    def ask(self, request: bytes, until: float | None) -> HttpAnswer:
        answer = HttpAnswer()
        try:
            self._plug.settimeout(None if until is None else _left(until))
            self._plug.sendall(request)
            while not answer.take(data := self._receive(until)):
                if not data:
                    if answer.ends_here():
                        break
                    raise ConnectionError(ENDED)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError from None
            if isinstance(error, OSError) and error.errno:
                raise ConnectionError(_reason(error)) from error
            raise
        self._used.note()
        return answer

    def _receive(self, until: float | None) -> bytes:
        self._plug.settimeout(None if until is None else _left(until))
        return self._plug.recv(PIECE)


def _left(until: float) -> float:
    """Seconds, but never none: a socket without a timeout would not wait at all."""
    return max(until - time.monotonic(), 0.001)


def _keep_alive(plug: Any) -> None:
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for each in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):  # not on every system
        if hasattr(socket, each):
            plug.setsockopt(socket.IPPROTO_TCP, getattr(socket, each), KEEPALIVE)


def _reason(error: Exception) -> str:
    """What the operating system says, without an address, which the message has already."""
    number = getattr(error, "errno", None)
    if number is None and (found := re.search(r"\[Errno (\d+)\]", str(error))):  # of several addresses
        number = int(found[1])
    return (
        os.strerror(number)
        if number is not None and number > 0
        else getattr(error, "strerror", None) or str(error)
    )


def _camel(method: str) -> str:
    return "".join(each.capitalize() for each in method.split("_"))
