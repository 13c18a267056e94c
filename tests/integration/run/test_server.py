"""The server of health pages and console: nobody waits for a client that dawdles."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import pytest

from onceward.run.health import server
from onceward.run.health.probes import HealthPage, Probes

LARGE = "x" * 1_000_000
PAGES = {
    "/livez": lambda: HealthPage(200, "text/plain", "ok"),
    "/large": lambda: HealthPage(200, "text/plain", LARGE),
}
HEAD = b"GET /livez HTTP/1.1\r\nHost: run\r\n"
POST = b"POST /livez HTTP/1.1\r\nHost: run\r\nContent-Length: 99\r\n\r\n"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 1)


@pytest.mark.req("UI-27")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(b"", b"", id="says-nothing"),
        pytest.param(HEAD, b"X: y\r\n", id="head-in-crumbs"),
        pytest.param(POST, b"x", id="body-in-crumbs"),
        pytest.param(HEAD + b"\r\n", b"", id="keeps-an-answered-connection"),
        pytest.param((HEAD + b"\r\n") * 2 + HEAD, b"X: y\r\n", id="begins-another-request"),
    ],
)
def test_a_client_that_dawdles_is_cut_off(first: bytes, then: bytes) -> None:
    async def story() -> None:
        async with server.serve(Probes(PAGES), "127.0.0.1", 0, "--health") as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            crumbs = asyncio.ensure_future(_send(writer, first, then))
            try:
                await asyncio.wait_for(_read_to_the_end(reader), 20)
            finally:
                crumbs.cancel()
                writer.transport.abort()
            assert await _status(url) == 200

    asyncio.run(story())


@pytest.mark.req("UI-27")
def test_a_client_that_does_not_read_is_cut_off() -> None:
    async def story() -> None:
        async with server.serve(Probes(PAGES), "127.0.0.1", 0, "--health") as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port, limit=4096)
            writer.write(b"GET /large HTTP/1.1\r\nHost: run\r\n\r\n" * 20)
            await asyncio.sleep(3)
            assert len(await _read_to_the_end(reader)) < 20 * len(LARGE)
            writer.transport.abort()

    asyncio.run(story())


def test_work_that_takes_long_is_no_reason_to_cut_a_client_off() -> None:
    async def story() -> None:
        async def slow(scope: object, receive: object, send: object) -> None:
            await asyncio.sleep(2.5)
            await Probes(PAGES)(scope, receive, send)

        async with server.serve(slow, "127.0.0.1", 0, "--health") as url:
            assert await _status(url) == 200

    asyncio.run(story())


def test_it_ends_at_once_while_clients_are_connected() -> None:
    async def story() -> None:
        async with server.serve(Probes(PAGES), "127.0.0.1", 0, "--health") as url:
            _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            assert await _status(url) == 200
            began = time.monotonic()
        assert time.monotonic() - began < 3
        writer.transport.abort()

    asyncio.run(story())


async def _send(writer: asyncio.StreamWriter, first: bytes, then: bytes) -> None:
    writer.write(first)
    while then:
        await asyncio.sleep(0.2)
        writer.write(then)


async def _read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    found = b""
    try:
        while piece := await reader.read(65536):
            found += piece
    except ConnectionError:
        return found
    return found


async def _status(url: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    writer.write(HEAD + b"Connection: close\r\n\r\n")
    line = await asyncio.wait_for(reader.readline(), 10)
    writer.transport.abort()
    return int(line.split()[1])
