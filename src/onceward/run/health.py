"""The supervisor's port, if one was asked for: a few pages over HTTP, for probes, scrapers and people with curl."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from onceward.errors import ConfigurationError
from onceward.run.pages import Page, Pages

REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}
PATIENCE = 5.0
"""Seconds that a client may take for its request."""


def parse_address(health: str) -> tuple[str, int]:
    """HOST:PORT; port 0 takes a free one."""
    host, _, port = health.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(
            f"--health must be HOST:PORT, not {health!r}; 127.0.0.1:8080 is for this machine, 0.0.0.0:8080 for all"
        )
    return host.strip("[]"), int(port)


@asynccontextmanager
async def health_served(pages: Pages, host: str, port: int) -> AsyncIterator[str]:
    """Answers while inside; yields the URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
            writer.write(_response(_page(pages, head)))
            await asyncio.wait_for(writer.drain(), PATIENCE)
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise ConfigurationError(
            f"--health {host}:{port} cannot be listened on: {error.strerror or error}; choose another address, or "
            "port 0 for a free one"
        ) from error
    try:
        bound = server.sockets[0].getsockname()[1]
        yield f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
    finally:
        server.close()


def _page(pages: Pages, head: bytes) -> Page:
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        return Page(405, "text/plain", "only GET\n")
    found = pages.by_path.get(path)
    if found is None:
        return Page(404, "text/plain", f"there are {', '.join(pages.by_path)}\n")
    page = found()
    return page._replace(body="") if method == "HEAD" else page


def _response(page: Page) -> bytes:
    body = page.body.encode()
    head = (
        f"HTTP/1.1 {page.status} {REASONS[page.status]}\r\nContent-Type: {page.kind}\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
