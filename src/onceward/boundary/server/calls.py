"""Calls within limits: how many run, how long each message may take to arrive, and the memory of those arriving."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from onceward.boundary.errors import Backpressure, BoundaryError, InvalidArgument, Unavailable
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.server.asgi import CALLS
from onceward.boundary.server.codecs import ARRIVING, refusal
from onceward.boundary.server.limits import ANSWER_ROOM, AnswerMemory, AnswerRoom, Limits

FREE = 64 * 1024
"""Bytes of a message that do not count: small calls work while large ones are refused."""
LEAST = 16 * 1024
"""Bytes of an upload in pieces that arrive within the time for a body: tiny ones would keep it open without end."""
FRAMED = (b"application/grpc", b"application/connect+")
"""Content types of calls in which each message has a prefix."""
PREFIX = 5
"""Its bytes: flags, and the length of the message."""

OUT = 512 * 1024
"""Bytes of a large answer that are sent at once."""
LAST = 128 * 1024
"""Bytes of its last piece, for which the call does not wait: as many as Envoy holds of a connection anyway."""
LOOK_EVERY = 0.25
"""Seconds between two looks whether the caller of a call that takes longer is still there."""

T = TypeVar("T")
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]


class LimitedCalls:
    """An ASGI application that passes calls on to another while there is room for them."""

    def __init__(self, application: Application, limits: Limits, metrics: BoundaryMetrics) -> None:
        self._application = application
        self.limits = limits
        self._metrics = metrics
        self.held = 0
        """Bytes of messages that have not arrived completely."""
        self.left = 0
        """Bytes of messages that errors of calls which have ended may hold: such an error is held by itself."""
        self._answers = AnswerMemory(limits.body_memory)
        self._running = 0
        self._stopping = False
        self._none_running = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if problem := self._problem(scope["path"], headers):
            await _refuse(send, problem)
            return
        self._running += 1
        body = _Messages(self, receive, headers)
        if scope["path"] in CALLS:
            body.begin()
        ARRIVING.set(body)
        room = AnswerRoom(self._answers)
        ANSWER_ROOM.set(room)
        try:
            await self._application(scope, body, partial(_send, send))
        finally:
            room.hold(0)
            body.release()
            self._collect()
            self._running -= 1
            if self._running == 0:
                self._none_running.set()

    def _problem(self, path: str, headers: dict[bytes, bytes]) -> BoundaryError | None:
        if headers.get(b"upgrade", b"").lower() == b"websocket":
            return InvalidArgument("Upgrade", "is not possible: this server does not speak WebSocket")
        if self._stopping:
            return Unavailable("this server is stopping; call it again when it has started, or another one")
        if self._running >= self.limits.calls and path in CALLS:  # pages for operators are answered
            self.count_refusal("calls")
            return Unavailable(f"{self._running} calls run, and [limits] calls allows no more; try later")
        return None

    def _collect(self) -> None:
        if self.left > self.limits.body_memory // 4:
            self.left = 0
            gc.collect()

    def count_refusal(self, limit: str) -> None:
        self._metrics.limited.labels(limit).inc()

    async def finish(self) -> None:
        """Refuse new calls, and wait until none runs."""
        self._stopping = True
        while self._running:
            self._none_running.clear()
            await self._none_running.wait()


class _Messages:
    """Receives the messages of one call."""

    def __init__(self, calls: LimitedCalls, receive: Receive, headers: dict[bytes, bytes]) -> None:
        self._calls = calls
        self._receive = receive
        self._framed = headers.get(b"content-type", b"").startswith(FRAMED)
        self._length = headers.get(b"content-length")
        self._arrived = False
        self._prefix = b""
        self._missing = 0
        self._size = 0
        """Bytes of the message that is arriving."""
        self._counted = 0
        self._since = 0
        """Bytes since the deadline was set."""
        self._waiting: asyncio.Future[dict[str, Any]] | None = None
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + calls.limits.body

    def begin(self) -> None:
        """Ask for the message now: until somebody reads it, it comes from a thread of Envoy."""
        self._waiting = asyncio.ensure_future(self._receive())

    async def __call__(self) -> dict[str, Any]:
        if self._arrived:
            return await self._disconnect()
        try:
            async with asyncio.timeout_at(self._deadline):
                event = await self._next()
        except TimeoutError:
            self._calls.count_refusal("body")
            raise refusal(
                Unavailable(
                    f"a message did not arrive within {self._calls.limits.body:g} s ([limits] body); send objects in "
                    "smaller pieces"
                )
            ) from None
        body = event.get("body", b"")
        if self._framed:
            self._follow(body)
        else:
            self._size += len(body)
            if event.get("more_body") and self._length == b"%d" % self._size:
                event = {**event, "more_body": False}  # its end arrives by itself, a switch of threads later
        self._arrived = event["type"] == "http.disconnect" or not event.get("more_body")
        self._count(max(self._size - FREE, 0))
        return event

    async def _disconnect(self) -> dict[str, Any]:
        """Wait until the caller has left. Envoy answers at once, also while the caller is there, with an empty end of
        the message: who asks again and again keeps two threads busy for as long as the call takes."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            event = await self._next()
            if event["type"] == "http.disconnect":
                return event

    async def _next(self) -> dict[str, Any]:
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(self._receive())
        event = await _finish(self._waiting)
        self._waiting = None
        return event

    def expand(self, size: int) -> None:
        self._size = max(self._size, size)
        self._count(max(self._size - FREE, 0))

    def waste(self, size: int) -> None:
        self._calls.left += size

    def release(self) -> None:
        self.waste(self._counted)
        self._count(0)

    def _count(self, size: int) -> None:
        calls, more = self._calls, size - self._counted
        if more > 0 and calls.held + more > calls.limits.body_memory:
            calls.count_refusal("body_memory")
            self.waste(more)
            raise refusal(
                Backpressure(
                    f"messages that are arriving take {calls.held} bytes, and [limits] body_memory allows "
                    f"{calls.limits.body_memory}; try later, or send objects in pieces"
                )
            )
        calls.held += more
        self._counted = size

    def _follow(self, body: bytes) -> None:
        """Find where messages end. The next one has its own size, and its own deadline if there was enough in it."""
        at = 0
        while at < len(body):
            if not self._missing:
                piece = body[at : at + PREFIX - len(self._prefix)]
                self._prefix += piece
                at += len(piece)
                if len(self._prefix) < PREFIX:
                    return
                self._size, self._missing = 0, int.from_bytes(self._prefix[1:])
                self._prefix = b""
            part = min(self._missing, len(body) - at)
            at += part
            self._size += part
            self._missing -= part
            self._since += part
            if not self._missing and self._since >= LEAST:
                self._since = 0
                self._deadline = self._loop.time() + self._calls.limits.body


def _send(send: Send, event: dict[str, Any]) -> Awaitable[None]:
    large = len(event.get("body", b"")) > LAST
    return _send_pieces(send, event) if large else _finish(send(event))


async def _send_pieces(send: Send, event: dict[str, Any]) -> None:
    """Envoy takes a whole body at once, however slowly it is read. A piece waits until there is room for the next, so
    the call lasts until its answer is read."""
    body, at = event["body"], 0
    while len(body) - at > LAST:
        piece = body[at : min(at + OUT, len(body) - LAST)]
        await _finish(send({"type": event["type"], "body": piece, "more_body": True}))
        at += len(piece)
    await _finish(send({**event, "body": body[at:]}))


def _finish(wait: Awaitable[T]) -> Awaitable[T]:
    """The caller may be canceled, but not the wait itself: pyvoy would fail to end it. What is not a future has nothing
    to wait for."""
    return asyncio.shield(wait) if asyncio.isfuture(wait) else wait


async def _refuse(send: Send, error: BoundaryError) -> None:
    """Clients of every protocol understand the status."""
    status = 400 if isinstance(error, InvalidArgument) else 503
    body = msgspec.json.encode({"code": error.code, "message": str(error)})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
