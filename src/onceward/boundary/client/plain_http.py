"""Calls over plain HTTP/1.1, in the event loop or the thread of their caller.

The library makes a call in threads of its own, and the ways to them and back take longer than all else that a client
does for a call. Streams, TLS and proxies are left to it.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

from pyqwest import (
    Headers,
    Request,
    Response,
    SyncRequest,
    SyncResponse,
    SyncTransport,
    Transport,
)

from onceward.boundary.client.http_answer import Answer, BadAnswer

MOST_IDLE = 64
"""Connections that are kept open for the next calls."""
IDLE_SECONDS = 60.0
"""How long. A server closes them after minutes."""
LOOKED_AT = 1.0
"""Seconds after which a connection is looked at before it is used: an event loop may not have run meanwhile, and a
request to a server that is gone fails."""
CONNECT_SECONDS = 30.0
NEXT_ADDRESS = 0.25
"""Seconds until the next address of a name is tried as well."""
KEEPALIVE = 30
"""Seconds without a byte after which the system asks whether the server is still there."""
PIECE = 256 * 1024
"""Bytes that are read at once."""
ENDED = "connection closed before the answer was complete"


def may_call_plainly(url: str) -> bool:
    """Return whether calls to this URL need nothing that only the library can do."""
    place = urlsplit(url)
    if place.scheme != "http" or not url.isascii() or "@" in place.netloc or not place.hostname:
        return False
    proxies = getproxies()
    return not ("http" in proxies or "all" in proxies) or bool(proxy_bypass(place.hostname))


class Target:
    """Where calls go, and how they are written."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._host = place.netloc
        self.address = (place.hostname or "", place.port or 80)

    def encode(self, request: Request | SyncRequest, body: bytes) -> bytes:
        lines = [f"{request.method} {urlsplit(request.url).path} HTTP/1.1", f"host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode("latin-1") + body


class Use:
    """When a connection was used, and whether it can be again."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def may_repeat(self, plug: Any) -> bool:
        unused = time.monotonic() - self.at
        if unused < LOOKED_AT or unused > IDLE_SECONDS:
            return unused < LOOKED_AT
        look = select.poll()
        look.register(plug.fileno(), select.POLLIN)
        return not look.poll(0)  # what arrives while nobody has asked is its end


# ── asyncio ─────────────────────────────────────────────────────────────────────────────────────────────


class AsyncPlainTransport:
    """Makes calls whose message is bytes. Others are made by what `library` returns."""

    def __init__(self, url: str, library: Callable[[], Transport]) -> None:
        self._target = Target(url)
        self._library = library
        self._idle: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncConnection]] = WeakKeyDictionary()

    async def execute(self, request: Request) -> Response:
        body = request.content
        if not isinstance(body, bytes):
            return await self._library().execute(request)
        connection = self._reusable() or await self._connect()
        answer = await connection.ask(self._target.encode(request, body))
        if answer.keeps_open and not connection.is_closed:
            self._keep(connection)
        else:
            connection.close()
        return Response(status=answer.status, headers=Headers(answer.headers), content=bytes(answer.body))

    def close(self) -> None:
        for loop, connections in list(self._idle.items()):
            for each in connections:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(each.close)
        self._idle.clear()

    def _reusable(self) -> AsyncConnection | None:
        idle = self._idle.get(asyncio.get_running_loop(), [])
        while idle:
            connection = idle.pop()
            if connection.is_usable():
                return connection
            connection.close()
        return None

    def _keep(self, connection: AsyncConnection) -> None:
        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        idle.append(connection)
        if len(idle) > MOST_IDLE:
            idle.pop(0).close()

    async def _connect(self) -> AsyncConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    AsyncConnection, *self._target.address, happy_eyeballs_delay=NEXT_ADDRESS
                )
        except TimeoutError:
            raise ConnectionError("no connection in time") from None
        except OSError as error:
            raise ConnectionError(_reason(error)) from error
        return connection


class AsyncConnection(asyncio.Protocol):
    """Carries one call at a time."""

    def __init__(self) -> None:
        self.is_closed = False
        self._answer = Answer()
        self._done: asyncio.Future[Answer] | None = None
        self._used = Use()

    async def ask(self, request: bytes) -> Answer:
        self._answer = Answer()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except BaseException:
            self._transport.abort()
            raise
        finally:
            self._done = None
            self._used = Use()

    def is_usable(self) -> bool:
        return not self.is_closed and self._used.may_repeat(self._transport.get_extra_info("socket"))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        _keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():  # nobody has asked
            self._transport.abort()
            return
        try:
            if self._answer.take(data):
                self._done.set_result(self._answer)
        except BadAnswer as error:
            self._done.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if self._done is None or self._done.done():
            return
        if error is None and self._answer.ends_here():
            self._done.set_result(self._answer)
        else:
            self._done.set_exception(ConnectionError(ENDED if error is None else _reason(error)))


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────────


class BlockingPlainTransport:
    """As `AsyncPlainTransport`, for threads."""

    def __init__(self, url: str, library: Callable[[], SyncTransport]) -> None:
        self._target = Target(url)
        self._library = library
        self._idle: list[BlockingConnection] = []
        self._process = os.getpid()

    def __del__(self) -> None:
        self.close()

    def execute_sync(self, request: SyncRequest) -> SyncResponse:
        body = request.content
        if not isinstance(body, bytes):
            return self._library().execute_sync(request)
        milliseconds = request.headers.get("connect-timeout-ms")
        until = None if milliseconds is None else time.monotonic() + int(milliseconds) / 1000
        connection = self._reusable() or self._connect(until)
        answer = connection.ask(self._target.encode(request, body), until)
        if answer.keeps_open and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        return SyncResponse(status=answer.status, headers=Headers(answer.headers), content=bytes(answer.body))

    def close(self) -> None:
        idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    def _reusable(self) -> BlockingConnection | None:
        if self._process != os.getpid():  # a forked child must not use the connections of its parent
            self.close()
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
        seconds = min(CONNECT_SECONDS, CONNECT_SECONDS if until is None else _left(until))
        try:
            plug = socket.create_connection(self._target.address, seconds)
        except TimeoutError:
            raise ConnectionError("no connection in time") from None
        except OSError as error:
            raise ConnectionError(_reason(error)) from error
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(plug)
        return BlockingConnection(plug)


class BlockingConnection:
    """Carries one call at a time."""

    def __init__(self, plug: socket.socket) -> None:
        self._plug = plug
        self._used = Use()

    def ask(self, request: bytes, until: float | None) -> Answer:
        answer = Answer()
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
        self._used = Use()
        return answer

    def is_usable(self) -> bool:
        return self._used.may_repeat(self._plug)

    def close(self) -> None:
        self._plug.close()

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
