"""The ASGI application: the service, and pages for operators: /metrics, /stats, /details, /livez and /readyz.

The library answers a request that is not a call (an unknown path, another method than POST, an unknown content type)
with a bare status. Here it gets the same body as every other error, which says what would work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from onceward.boundary.boundary import Boundary
from onceward.boundary.errors import BoundaryError
from onceward.boundary.links.manager import Links
from onceward.boundary.server.access import CERTIFICATE, Certificate, Guard
from onceward.boundary.server.codecs import BinaryCodec, CountedGzip, JsonCodec
from onceward.boundary.server.pages import OPEN_PAGES, PAGES, BoundaryPages, Page
from onceward.boundary.server.rpc import LARGEST_UNARY, BoundaryRpc
from onceward.boundary.v1.boundary_connect import BoundaryService, BoundaryServiceASGIApplication

CALLS = {f"/{BoundaryService.desc().type_name}/{each.name}": each for each in BoundaryService.desc().methods}
CODES = {404: "unimplemented", 405: "unimplemented", 415: "invalid_argument"}
"""Statuses without a body, with the code that a client would derive from each."""

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Application:
    """With a guard, only known peers are answered; /livez and /readyz are open to every connection."""

    def __init__(self, boundary: Boundary, guard: Guard | None = None, links: Links | None = None) -> None:
        self._pages = BoundaryPages(boundary, links)
        self._guard = guard
        self._rpc = BoundaryServiceASGIApplication(
            cast(BoundaryService, BoundaryRpc(boundary, guard)),
            interceptors=[] if guard is None else [guard],
            codecs=[BinaryCodec(), JsonCodec()],
            compressions=[CountedGzip()],
            read_max_bytes=LARGEST_UNARY,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if self._guard is not None:
            CERTIFICATE.set(Certificate.of(scope))
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
