"""What is said to a request that is no call: an unknown path, another method than POST, an unknown content type.

The library answers these with a status alone. Here they get the body of every other error, and it says what there is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from onceward.boundary.v1.boundary_connect import BoundaryService

Send = Callable[[dict[str, Any]], Awaitable[None]]

CALLS = {f"/{BoundaryService.desc().type_name}/{each.name}": each for each in BoundaryService.desc().methods}
CODES = {404: "unimplemented", 405: "unimplemented", 415: "invalid_argument"}
"""Of the statuses, as a client would take them."""


def telling(send: Send, scope: dict[str, Any], pages: Iterable[str]) -> Send:
    """`send`, which gives an answer that has nothing but such a status its body. `pages` are the paths for GET."""
    body = b""

    async def told(message: dict[str, Any]) -> None:
        nonlocal body
        if message["type"] == "http.response.start" and message["status"] in CODES:
            headers = list(message["headers"])
            if not any(name.lower() == b"content-type" for name, _ in headers):
                body = _body(message["status"], scope, pages)
                message = {**message, "headers": [*headers, (b"content-type", b"application/json")]}
        elif body and message["type"] == "http.response.body":
            message = {**message, "body": body}
        await send(message)

    return told


def _body(status: int, scope: dict[str, Any], pages: Iterable[str]) -> bytes:
    path = scope["path"]
    if status == 404:
        *others, last = CALLS
        words = (
            f"there is no {path:.200}; the calls are POST {', '.join(others)} and {last}; the pages are GET "
            f"{', '.join(pages)}"
        )
    elif status == 405:
        words = f"{path} is called with POST, not with {scope['method']:.20}"
    else:
        given = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
        words = f"{path} takes the content types {_content_types(path)}, not {given!r:.100}"
    return msgspec.json.encode({"code": CODES[status], "message": words})


def _content_types(path: str) -> str:
    connect = "application/" if CALLS[path].method_kind == "unary" else "application/connect+"
    return f"{connect}json and {connect}proto, or application/grpc from a gRPC client"
