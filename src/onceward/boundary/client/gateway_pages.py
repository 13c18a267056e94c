"""The page of a proxy, in the place of an answer, while the boundary behind it is down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from connectrpc.client import ResponseMetadata
from connectrpc.code import Code
from connectrpc.errors import ConnectError


@contextmanager
def retryable_pages() -> Iterator[None]:
    """Make such a page `unavailable`. The library knows only 502, 503 and 504; others are `unknown` to it, a code that
    a boundary never sends."""
    with ResponseMetadata() as answer:
        try:
            yield
        except ConnectError as error:
            status = answer.http_status or 0
            if error.code is Code.UNKNOWN and status >= 500:
                raise ConnectError(
                    Code.UNAVAILABLE, f"it answered {status} {error.message}".rstrip()
                ) from None
            raise
