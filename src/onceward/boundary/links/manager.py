"""Forwarding between zones: the links of a server, each of which pulls from one source independently. One that is cut
off or stopped does not delay the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from onceward._secrets import mask_url
from onceward.boundary.boundary import Boundary
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.client.transport import check_url
from onceward.boundary.links.link import LONGEST_WAIT, ZoneLink
from onceward.boundary.links.report import LinkState, LinkStopped
from onceward.boundary.metrics import BoundaryMetrics
from onceward.errors import ConfigurationError

__all__ = ["LinkSettings", "LinkStopped", "Links", "ZoneLink"]


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a link; `ZoneLink` explains them."""

    name: str
    url: str
    consumer: str = ""
    from_zones: tuple[str, ...] = ()
    to_zones: tuple[str, ...] = ()
    longest_wait: float = LONGEST_WAIT
    client: Callable[[], AsyncBoundaryClient] | None = None
    """Makes a client of the source, if it needs certificates. Called again after every failure."""


class RunningLink(NamedTuple):
    settings: LinkSettings
    link: ZoneLink
    task: asyncio.Task[None]


class Links:
    """Runs links into a boundary of this process, next to its server."""

    def __init__(self, boundary: Boundary, zone: str, settings: Sequence[LinkSettings] = ()) -> None:
        self._boundary = boundary
        self._zone = zone
        self._settings = _by_name(settings)
        self._check(self._settings)
        self._running: dict[str, RunningLink] = {}

    def start(self) -> None:
        """Start the links that are not running. Needs a running event loop."""
        for name, each in self._settings.items():
            if name not in self._running:
                link = self._build(each, self._boundary.metrics)
                task = asyncio.create_task(link.run(), name=f"link {name}")
                self._running[name] = RunningLink(each, link, task)

    async def update(self, settings: Sequence[LinkSettings]) -> None:
        """Replace the links. One with unchanged settings keeps running; bad settings are refused and change nothing."""
        wanted = _by_name(settings)
        self._check(wanted)
        self._settings = wanted
        for name, old in list(self._running.items()):
            if wanted.get(name) != old.settings:
                await self._stop(name)
        self.start()

    @property
    def zone(self) -> str:
        return self._zone

    def states(self) -> list[LinkState]:
        """What an operator wants to know of each."""
        return [
            msgspec.structs.replace(
                link.report.state(),
                source=mask_url(each.url),
                from_zones=each.from_zones,
                to_zones=each.to_zones,
            )
            for each, link, _ in self._running.values()
        ]

    async def close(self) -> None:
        """Cancel all links. Facts that are appended but not confirmed are sent again, and recognized."""
        for name in list(self._running):
            await self._stop(name)

    async def _stop(self, name: str) -> None:
        _, link, task = self._running.pop(name)
        link.end()  # the HTTP library loses a cancellation that arrives together with an answer
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self._boundary.metrics.forget_link(name)

    def _check(self, settings: dict[str, LinkSettings]) -> None:
        """Refuse now what would be refused at the start."""
        for each in settings.values():
            try:
                check_url(each.url)
            except ConfigurationError as error:
                raise ConfigurationError(f"link {each.name!r}: {error}") from None
            self._build(each, BoundaryMetrics())

    def _build(self, settings: LinkSettings, metrics: BoundaryMetrics) -> ZoneLink:
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
        raise ConfigurationError("two links have the same name; each needs its own")
    return found
