"""Forwarding between zones: the links of a server, each of which pulls from one source by itself. One that is cut or
stopped holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from onceward.boundary.boundary import Boundary
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.client.transport import checked_url
from onceward.boundary.links.link import LONGEST_WAIT, ZoneLink
from onceward.boundary.links.report import LinkStopped
from onceward.boundary.metrics import BoundaryMetrics
from onceward.errors import ConfigurationError

__all__ = ["LinkSettings", "LinkStopped", "Links", "ZoneLink"]


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say about a link. `Link` says what it means."""

    name: str
    url: str
    consumer: str = ""
    from_zones: tuple[str, ...] = ()
    to_zones: tuple[str, ...] = ()
    longest_wait: float = LONGEST_WAIT
    client: Callable[[], AsyncBoundaryClient] | None = None
    """Makes a client of the source, for who has certificates. Called again after every failure."""


class RunningLink(NamedTuple):
    settings: LinkSettings
    link: ZoneLink
    task: asyncio.Task[None]


class Links:
    """Runs links into a boundary of this process, beside its server."""

    def __init__(self, boundary: Boundary, zone: str, settings: Sequence[LinkSettings] = ()) -> None:
        self._boundary = boundary
        self._zone = zone
        self._settings = _by_name(settings)
        self._check(self._settings)
        self._running: dict[str, RunningLink] = {}

    def start(self) -> None:
        """Within an event loop."""
        for name, each in self._settings.items():
            if name not in self._running:
                link = self._made(each, self._boundary.metrics)
                task = asyncio.create_task(link.run(), name=f"link {name}")
                self._running[name] = RunningLink(each, link, task)

    async def update(self, settings: Sequence[LinkSettings]) -> None:
        """From now on these. A link whose settings are equal runs on; refused ones change nothing."""
        wanted = _by_name(settings)
        self._check(wanted)
        self._settings = wanted
        for name, old in list(self._running.items()):
            if wanted.get(name) != old.settings:
                await self._stop(name)
        self.start()

    async def close(self) -> None:
        """Cut off where they are: what is appended and not confirmed comes again, and is known then."""
        for name in list(self._running):
            await self._stop(name)

    async def _stop(self, name: str) -> None:
        _, link, task = self._running.pop(name)
        link.end()  # an answer that comes at this moment makes the HTTP library forget that it was cancelled
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self._boundary.metrics.forget_link(name)

    def _check(self, settings: dict[str, LinkSettings]) -> None:
        """Refuses now what would be refused when they start."""
        for each in settings.values():
            try:
                checked_url(each.url)
            except ConfigurationError as error:
                raise ConfigurationError(f"link {each.name!r}: {error}") from None
            self._made(each, BoundaryMetrics())

    def _made(self, settings: LinkSettings, metrics: BoundaryMetrics) -> ZoneLink:
        return ZoneLink(
            settings.name,
            settings.client or partial(AsyncBoundaryClient, settings.url),
            self._boundary,
            self._zone,
            consumer=settings.consumer,
            from_zones=settings.from_zones,
            to_zones=settings.to_zones,
            longest_wait=settings.longest_wait,
            metrics=metrics,
        )


def _by_name(settings: Sequence[LinkSettings]) -> dict[str, LinkSettings]:
    found = {each.name: each for each in settings}
    if len(found) < len(settings):
        raise ConfigurationError("two links have the same name; each needs one of its own")
    return found
