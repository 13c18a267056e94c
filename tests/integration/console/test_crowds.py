"""Many browsers at once: those that are too many to be kept current still get pages, and probes an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from onceward import Onceward
from onceward.console import create, overview, site
from onceward.run.health import server
from tests.support.wait import until_async

pytestmark = pytest.mark.req("UI-31")


@pytest.mark.parametrize("at_once", [True, False])
def test_pages_and_probes_have_room_beside_all_live_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    monkeypatch.setattr(overview, "MOST_LIVE", 3)
    monkeypatch.setattr(server, "AT_ONCE", 8)
    app = Onceward("shop")
    app.consumer(f"sqlite:///{tmp_path}/orders.db", name="charge")(lambda order: None)
    made = create(app)

    async def story() -> None:
        async with site.serve(made, "127.0.0.1", 0, "--listen") as url:
            asked: list[Any] = []
            for _ in range(6):
                asked.append(asyncio.ensure_future(ask(url, "/events")))
                if not at_once:
                    await asked[-1]
            streams = [await each for each in asked]
            assert sorted(code for code, _ in streams) == [200, 200, 200, 204, 204, 204]
            for path in ("/", "/consumers/charge", "/livez", "/readyz", "/metrics"):
                code, writer = await ask(url, path)
                assert code == 200, path
                writer.transport.abort()
            for _, writer in streams:
                writer.transport.abort()
            await until_async(lambda: made.state.console.live == 0)
            code, writer = await ask(url, "/events")
            assert code == 200, "there is room again"
            writer.transport.abort()

    asyncio.run(story())


async def ask(url: str, path: str) -> tuple[int, asyncio.StreamWriter]:
    port = urlsplit(url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    return int((await reader.readline()).split()[1]), writer
