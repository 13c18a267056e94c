"""The boundaries that an app uses: log, cursors, room, retention, links to other zones, artifacts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from onceward.connectors.boundary.scheme import read_details, read_stats, server_of
from onceward.connectors.reports import ServerUnreachable
from onceward.connectors.urls import Address

if TYPE_CHECKING:
    from onceward.app.app import Onceward
    from onceward.console.site import Console


async def boundaries(request: Request) -> Response:
    console: Console = request.app.state.console
    app = console.backstage.app
    found = await run_in_threadpool(lambda: [_describe(app, *each) for each in _used(app).items()])
    return console.page(request, "boundary.html", boundaries=found)


def _used(app: Onceward) -> dict[str, Address]:
    """An address of each boundary, by its own URL."""
    places = [each.source for each in app.consumers.values()] + [each.sink for each in app.producers.values()]
    return {server_of(each): each for each in reversed(places) if each.scheme.startswith("boundary+")}


def _describe(app: Onceward, url: str, address: Address) -> dict[str, Any]:
    """What it says. A part that it does not answer is None, with the reason."""
    found: dict[str, Any] = {"url": url, "stats": None, "details": None, "problems": []}
    for name, read in (("stats", read_stats), ("details", read_details)):
        try:
            found[name] = read(address)
        except ServerUnreachable as error:
            found["problems"].append(str(error))
            break
    found["consumers"] = {
        str(each.source.settings.get("consumer")): name
        for name, each in app.consumers.items()
        if each.source.scheme.startswith("boundary+") and server_of(each.source) == url
    }
    return found
