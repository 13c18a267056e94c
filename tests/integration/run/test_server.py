"""The server of health pages and console: nobody waits for a client that dawdles."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from onceward.run.health import server
from onceward.run.health.probes import HealthPage, Probes
from tests.support.wait import until_async

LARGE = "x" * 1_000_000
PAGES = {
    "/livez": lambda: HealthPage(200, "text/plain", "ok"),
    "/metrics": lambda: HealthPage(200, "text/plain", "ok 1"),
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


# ── crowds ──────────────────────────────────────────────────────────────────────────────────────────────


async def _held(scope: Any, receive: Any, send: Any) -> None:
    """Probes, and pages that browsers keep open."""
    if scope["path"] in PAGES:
        await Probes(PAGES)(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"live", "more_body": True})
    await receive()  # the whole request
    await receive()  # until its browser leaves


@pytest.mark.req("UI-31")
def test_probes_get_an_answer_whatever_browsers_keep_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "AT_ONCE", 10)
    monkeypatch.setattr(server, "CONNECTIONS", 20)

    async def story() -> None:
        async with server.serve(_held, "127.0.0.1", 0, "--console") as url:
            streams = [await _open(url, "/events") for _ in range(10)]
            for reader, _ in streams:
                assert (await reader.readline()).split()[1] == b"200"
            refused, writer = await _open(url, "/events")
            assert (await refused.readline()).split()[1] == b"503"
            writer.transport.abort()
            for path in ("/livez", "/metrics"):
                assert await _status(url, path) == 200
            streams.pop()[1].transport.abort()

            async def has_room() -> bool:
                return await _status(url, "/page") == 200

            await until_async(has_room)
            for _, writer in streams:
                writer.transport.abort()

    asyncio.run(story())


@pytest.mark.req("UI-31")
def test_connections_that_ask_nothing_make_room_for_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 60)
    monkeypatch.setattr(server, "AT_ONCE", 5)
    monkeypatch.setattr(server, "CONNECTIONS", 10)

    async def story() -> None:
        async with server.serve(_held, "127.0.0.1", 0, "--console") as url:
            streams = [await _open(url, "/events") for _ in range(5)]
            for reader, _ in streams:
                assert (await reader.readline()).split()[1] == b"200"
            idle = [await asyncio.open_connection("127.0.0.1", urlsplit(url).port) for _ in range(30)]
            for _ in range(5):
                assert await _status(url) == 200
            assert await asyncio.wait_for(_read_to_the_end(idle[0][0]), 10) == b"", "the oldest was closed"
            for reader, _ in streams:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(_read_to_the_end(reader), 0.1)  # they go on
            for _, writer in (*streams, *idle):
                writer.transport.abort()

    asyncio.run(story())


async def _open(url: str, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: run\r\n\r\n".encode())
    return reader, writer


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


async def _status(url: str, path: str = "/livez") -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    writer.write(HEAD.replace(b"/livez", path.encode()) + b"Connection: close\r\n\r\n")
    line = await asyncio.wait_for(reader.readline(), 10)
    writer.transport.abort()
    return int(line.split()[1])
