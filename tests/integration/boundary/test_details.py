"""The page of a boundary for operators: room, retention, links and artifacts; and the console's page of it."""

from __future__ import annotations

import asyncio
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from onceward import Onceward
from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.links.report import LinkState
from onceward.boundary.server import pages
from onceward.boundary.server.asgi import Application
from onceward.boundary.server.pages import BoundaryPages
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.console import create
from onceward.testing.boundary import fact
from tests.integration.console.test_access import Browser
from tests.support.boundary.server import boundary_server
from tests.support.boundary.zones_world import World, Zone, pieces_of, zones_in
from tests.support.wait import until, until_async

pytestmark = pytest.mark.req("UI-21")

ODD = "<img src=x onerror=alert(1)>"
SETTINGS = BoundarySettings(capacity_bytes=10**6, retention={"audit": 3600.0})


def test_details_have_room_retention_and_artifacts_and_unknown_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(found: BoundaryPages) -> Any:
        status, _, body = await found.answer("/details")
        assert status == 200
        return json.loads(body)

    async def story() -> None:
        store = SqliteBoundaryStore(tmp_path / "hq")
        try:
            boundary = Boundary(store, SETTINGS)
            found = BoundaryPages(boundary)
            await store.append(fact("m1"))
            await boundary.put("files", "a.pdf", pieces_of(b"x" * 5000), "application/pdf")
            details = await read(found)
            assert (details["zone"], details["links"], details["expiry_halted"]) == ("", [], "")
            assert details["retention_seconds"]["audit"] == 3600
            assert details["retention_seconds"]["operational"] == 7 * 86400
            log = details["log"]
            assert 0 < log.pop("bytes") < 10**6
            assert log == {"capacity_bytes": 10**6, "full_at_bytes": 800_000, "drops_oldest": False}
            assert details["artifacts"]["usage"] == {"count": 1, "size": 5000}
            assert [each["key"] for each in details["artifacts"]["first"]] == ["a.pdf"]

            async def hang() -> int:
                await asyncio.sleep(60)
                return 0

            monkeypatch.setattr(pages, "ANSWER_WAIT", 0.05)
            monkeypatch.setattr(store, "size", hang)
            assert (await read(found))["log"]["bytes"] is None
        finally:
            await store.close()

    asyncio.run(story())


def test_a_link_says_whether_it_is_up_down_or_stopped_and_why(tmp_path: Path) -> None:
    async def story() -> None:
        async with zones_in(tmp_path) as world:
            await tell(world)

    async def tell(world: World) -> None:
        plant, hq = await world.zone("plant"), await world.zone("hq")
        between = await world.proxy(plant.url)
        await hq.pull(between.url, from_zones=("plant",))
        await plant.say(3)
        state = await has_state(hq, "up", frontier=3)
        assert (state.waiting, state.missed, state.problem) == (0, 0, "")
        assert (state.source, state.consumer, state.from_zones) == (between.url, "zone:hq", ("plant",))
        between.cut()
        assert "cannot be reached" in (await has_state(hq, "down")).problem
        between.heal()
        await has_state(hq, "up")
        stranger = await world.zone("stranger")
        await plant.boundary.append_all([stranger.message()])
        stopped = await has_state(hq, "stopped")
        assert "'stranger'" in stopped.problem
        assert stopped.waiting == 1

    asyncio.run(story())


async def has_state(zone: Zone, state: str, frontier: int = 0) -> LinkState:
    def look() -> LinkState | None:
        [found] = zone.links.states()
        return found if found.state == state and found.frontier >= frontier else None

    found: LinkState = await until_async(look)
    return found


# ── in the console ──────────────────────────────────────────────────────────────────────────────────────


class Links:
    """A link as a server may have it."""

    zone = f"hq {ODD}"

    def states(self) -> list[LinkState]:
        return [
            LinkState(f"plant {ODD}", "down", f"refused {ODD}", "zone:hq", 1234, 2, 65.0, 1, f"http://{ODD}")
        ]


def page_of(url: str, directory: Path) -> tuple[str, str]:
    """The page, and what a reader sees."""
    app = Onceward("shop", database=f"sqlite:///{directory}/shop.db")
    app.consumer(f"boundary+{url}?consumer=billing", name="charge")(lambda order: None)
    site = create(app)
    text = Browser(site, "127.0.0.1", "127.0.0.1").get("/boundary").text
    site.state.console.backstage.stop()
    return text, " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text.partition("<main")[2])).split())


def test_the_console_shows_log_cursors_links_retention_and_artifacts(tmp_path: Path) -> None:
    def application(boundary: Boundary) -> Application:
        async def fill() -> None:
            await boundary.store.append(fact("m1"))
            await boundary.register("billing")
            await boundary.put("files", f"a {ODD}.pdf", pieces_of(b"x" * 5000), "application/pdf")

        filled = asyncio.ensure_future(fill())
        filled.add_done_callback(lambda done: done.result())
        return Application(boundary, links=Links())  # type: ignore[arg-type]

    with boundary_server(tmp_path / "hq", SETTINGS, application) as url:
        page, text = until_filled(url, tmp_path)
    assert ODD not in page
    assert f"{url} zone hq {ODD}" in text
    assert "Facts 1 offsets 1 to 1" in text
    assert "of 976.6 KiB" in text
    assert re.search(r"billing 0 1 (0|1|under 1) s never", text)
    assert 'href="/consumers/charge"' in page
    assert f"down refused {ODD} 1,234 2 1 min 5 s 1" in text
    assert "audit facts are kept 1 h" in text
    assert "new facts are refused, from 781.2 KiB on" in text
    assert "Artifacts 1 4.9 KiB" in text
    assert f"files a {ODD}.pdf 4.9 KiB application/pdf" in text


def until_filled(url: str, directory: Path) -> tuple[str, str]:
    def look() -> tuple[str, str] | None:
        found = page_of(url, directory)
        return found if "files a" in found[1] else None

    return until(look)


def test_a_boundary_that_does_not_answer_or_is_older_is_unknown(tmp_path: Path) -> None:
    page, text = page_of("http://127.0.0.1:1", tmp_path)
    assert "cannot read http://127.0.0.1:1/stats" in text
    assert "Retention" not in page

    def older(boundary: Boundary) -> Any:
        service = Application(boundary)

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await service(
                {**scope, "path": "/none"} if scope.get("path") == "/details" else scope, receive, send
            )

        return answer

    with boundary_server(tmp_path / "hq", None, older) as url:
        page, text = page_of(url, tmp_path)
    assert "Facts 0" in text
    assert "Size unknown capacity unknown" in text
    assert "Artifacts unknown" in text
    assert "Retention" not in page
