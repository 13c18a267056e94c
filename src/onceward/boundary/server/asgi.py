"""The ASGI application: the service, and pages for operators: /metrics, /stats, /details, /livez and /readyz.

The library answers a request that is not a call (an unknown path, another method than POST, an unknown content type)
with a bare status. Here it gets the same body as every other error, which says what would work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast

import msgspec
from connectrpc.code import Code
from connectrpc.errors import ConnectError

from onceward.boundary.boundary import Boundary
from onceward.boundary.errors import BoundaryError
from onceward.boundary.links.manager import Links
from onceward.boundary.server.access import CERTIFICATE, Certificate, Guard
from onceward.boundary.server.codecs import BinaryCodec, CountedGzip, JsonCodec
from onceward.boundary.server.pages import OPEN_PAGES, PAGES, BoundaryPages, Page
from onceward.boundary.server.rpc import LARGEST_UNARY, BoundaryRpc
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.v1.boundary_connect import BoundaryService, BoundaryServiceASGIApplication

CALLS = {f"/{BoundaryService.desc().type_name}/{each.name}": each for each in BoundaryService.desc().methods}
CODES = {404: "unimplemented", 405: "unimplemented", 415: "invalid_argument"}
"""Statuses without a body, with the code that a client would derive from each."""

HOT: dict[str, tuple[str, Any]] = {
    "AppendFact": ("append_fact", pb.AppendFactRequest),
    "AppendFacts": ("append_facts", pb.AppendFactsRequest),
    "FetchFacts": ("fetch_facts", pb.FetchFactsRequest),
    "ConfirmReceipt": ("confirm_receipt", pb.ConfirmReceiptRequest),
}
"""Calls that are made most: their function, and what it takes."""
PLAIN = {
    b"content-type": (b"application/proto",),
    b"content-encoding": (b"", b"identity"),
    b"accept-encoding": (b"", b"identity"),
    b"connect-protocol-version": (b"1",),
}
"""Headers that may have these values only, in calls that the library is not needed for."""
LOOK_AFTER = 0.1
"""Seconds of a call after which to look whether its caller is still there."""

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Application:
    """With a guard, only known peers are answered; /livez and /readyz are open to every connection."""

    def __init__(self, boundary: Boundary, guard: Guard | None = None, links: Links | None = None) -> None:
        self._pages = BoundaryPages(boundary, links)
        self._guard = guard
        service = BoundaryRpc(boundary, guard)
        self._rpc = BoundaryServiceASGIApplication(
            cast(BoundaryService, service),
            interceptors=[] if guard is None else [guard],
            codecs=[BinaryCodec(), JsonCodec()],
            compressions=[CountedGzip()],
            read_max_bytes=LARGEST_UNARY,
        )
        self._hot = HotCalls(service, guard, self._rpc)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope.get("method") == "HEAD":
            send = _without_body(send)
        if self._guard is not None:
            CERTIFICATE.set(Certificate.of(scope))
        if (call := self._hot.find(scope)) is not None:
            await self._hot.answer(call, scope, receive, send)
            return
        if path not in PAGES:
            answer: Any = _with_error_body(send, scope)  # its type depends on whether asgiref is installed
            await self._rpc(scope, receive, answer)
            return
        status, kind, body = self._refusal(path) or await self._pages.answer(path)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, path: str) -> Page | None:
        if self._guard is None or path in OPEN_PAGES:
            return None
        try:
            self._guard.check(path)
        except BoundaryError as error:
            return 401, b"text/plain; charset=utf-8", f"{error}\n".encode()
        return None


class HotCall(NamedTuple):
    name: str
    seconds: float | None


class HotCalls:
    """Answers the calls that are made most, if they arrive as Connect's unary protobuf. The library can do more, for
    which each call pays with a task and with headers that it does not have. All else is left to it: other protocols,
    compression, whatever it would refuse, and how an error is written."""

    def __init__(self, service: Any, guard: Guard | None, library: Any) -> None:
        self._functions = {name: getattr(service, function) for name, (function, _) in HOT.items()}
        self._guard = guard
        self._library = library
        self._codec = BinaryCodec()

    def find(self, scope: dict[str, Any]) -> HotCall | None:
        """Return the call, if it is one that is answered here."""
        name = scope.get("path", "").removeprefix(f"/{BoundaryService.desc().type_name}/")
        if name not in HOT or scope["method"] != "POST":
            return None
        headers = dict(scope["headers"])
        if len(headers) != len(scope["headers"]) or b"content-type" not in headers:
            return None
        if any(headers.get(each, values[-1]) not in values for each, values in PLAIN.items()):
            return None
        limit = headers.get(b"connect-timeout-ms")
        if limit is None:
            return HotCall(name, None)
        return HotCall(name, int(limit) / 1000) if limit.isdigit() and len(limit) <= 10 else None

    async def answer(self, call: HotCall, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        try:
            body = self._codec.encode(await self._ask(call, receive))
        except Exception as error:  # noqa: BLE001  the library says it to the caller, as it says all others

            async def fail() -> dict[str, Any]:
                raise raised

            raised = error
            await self._library(scope, fail, send)
            return
        headers = [
            (b"content-type", b"application/proto"),
            (b"content-encoding", b"identity"),
            (b"vary", b"Accept-Encoding"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers, "trailers": False})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _ask(self, call: HotCall, receive: Receive) -> Any:
        watch: Watch | None = None
        try:
            async with asyncio.timeout(call.seconds) as limit:
                request = _decode(HOT[call.name][1], await _read_body(receive))
                if self._guard is not None:
                    self._guard.check_call(call.name, request)
                watch = Watch(receive, limit)
                try:
                    return await self._functions[call.name](request, None)
                finally:
                    watch.end()
        except TimeoutError:
            if not limit.expired():
                raise
            if watch is not None and watch.is_gone:
                raise ConnectError(Code.CANCELED, "Client disconnected") from None
            raise ConnectError(Code.DEADLINE_EXCEEDED, "Request timed out") from None


class Watch:
    """Ends a call whose caller has left. Only one that takes a while pays for the look."""

    def __init__(self, receive: Receive, limit: asyncio.Timeout) -> None:
        self.is_gone = False
        self._receive = receive
        self._limit = limit
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._later = self._loop.call_later(LOOK_AFTER, self._begin)

    def end(self) -> None:
        self._later.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._look())

    async def _look(self) -> None:
        with suppress(Exception):  # of the server, which has lost the caller or ends
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.is_gone = True
            self._limit.reschedule(self._loop.time())


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise ConnectError(Code.CANCELED, "Client disconnected before request completion")
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_UNARY:
            raise ConnectError(
                Code.RESOURCE_EXHAUSTED, f"message is larger than configured max {LARGEST_UNARY}"
            )
        if not event.get("more_body", False):
            return b"".join(parts)


def _decode(kind: Any, body: bytes) -> Any:
    try:
        return kind.from_binary(body)
    except Exception as error:
        raise ConnectError(Code.INVALID_ARGUMENT, f"unmarshal message: {error}") from error


def _without_body(send: Send) -> Send:
    """Wrap `send`: an answer to HEAD has headers only. Envoy sends what it gets, and the caller would take it for the
    beginning of the next answer."""

    async def send_headers(message: dict[str, Any]) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_headers


def _with_error_body(send: Send, scope: dict[str, Any]) -> Send:
    """Wrap `send`: add a body to an answer that has only a status from `CODES`."""
    body = b""

    async def send_with_body(message: dict[str, Any]) -> None:
        nonlocal body
        if message["type"] == "http.response.start" and message["status"] in CODES:
            headers = list(message["headers"])
            if not any(name.lower() == b"content-type" for name, _ in headers):
                body = _error_body(message["status"], scope)
                message = {**message, "headers": [*headers, (b"content-type", b"application/json")]}
        elif body and message["type"] == "http.response.body":
            message = {**message, "body": body}
        await send(message)

    return send_with_body


def _error_body(status: int, scope: dict[str, Any]) -> bytes:
    path = scope["path"]
    if status == 404:
        *others, last = CALLS
        message = (
            f"there is no {path:.200}; the calls are POST {', '.join(others)} and {last}; the pages are GET "
            f"{', '.join(PAGES)}"
        )
    elif status == 405:
        message = f"call {path} with POST, not {scope['method']:.20}"
    else:
        given = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
        message = f"{path} accepts the content types {_content_types(path)}, not {given!r:.100}"
    return msgspec.json.encode({"code": CODES[status], "message": message})


def _content_types(path: str) -> str:
    connect = "application/" if CALLS[path].method_kind == "unary" else "application/connect+"
    return f"{connect}json and {connect}proto, or application/grpc from a gRPC client"
