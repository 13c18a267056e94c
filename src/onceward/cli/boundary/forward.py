"""`onceward boundary forward`: pull facts of another zone into this one, once or continuously."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from onceward._secrets import mask_url
from onceward.cli.boundary.options import client_for, require_extra
from onceward.cli.exit import AsJson, fail, flag, option, refuse_mistakes
from onceward.cli.output import print_result, progress_bars
from onceward.errors import OncewardError

if TYPE_CHECKING:
    from onceward.boundary import AsyncBoundaryClient
    from onceward.boundary.boundary import Boundary
    from onceward.boundary.links.link import ZoneLink

WORDS = {
    "appended": "appended",
    "duplicate": "already there",
    "own": "of this zone itself",
    "not_for_us": "for other zones",
    "missed": "expired before",
}
REFRESH_SECONDS = 0.1

Source = Annotated[str, option("URL", "Boundary to pull facts from.", "--from")]
Zone = Annotated[str, option("NAME", "The receiving zone.", "--zone")]
Origins = Annotated[
    list[str] | None, option("ZONE", "Zone that the source may send facts of; repeatable.", "--from-zone")
]
Addressees = Annotated[
    list[str] | None, option("ZONE", "Pull only facts for this zone; repeatable.", "--to-zone")
]


def forward(
    source: Source,
    target: Annotated[str, option("URL|STORE", "Receiving boundary, or its store, which is faster.", "--to")],
    zone: Zone,
    consumer: Annotated[
        str, option("NAME", "Consumer name at the source.", show_default="zone:<the zone>")
    ] = "",
    from_zone: Origins = None,
    to_zone: Addressees = None,
    once: Annotated[bool, flag("Stop at the end of the source, or at a failure.", "--once")] = False,
    as_json: AsJson = False,
) -> None:
    """Pull facts and their artifacts from one boundary into another. Each is confirmed once it is durable there.

    It retries a broken connection until it works again, and stops at a fact that it cannot append until you decide with
    `skip`. The first SIGTERM or Ctrl-C finishes the current page, a second one cuts it off; both are safe to repeat.

    It appends to a URL one fact at a time, to keep their order. It appends to a store (a directory, postgresql://…,
    nats://…) hundreds at a time; the directory must not have a running server. `serve` with links in its
    configuration does both.

    Exit code: 0 when stopped, or with --once at the end; 1 with --once at a failure or a fact that it cannot append;
    130 or 143 if a second signal cut it off; 2 for wrong arguments.
    """
    with require_extra(as_json):
        from onceward.boundary.links.link import ZoneLink
        from onceward.boundary.server.process import start_logging

    async def run() -> None:
        await client_for(source, "--from").close()  # refuses an invalid URL before anything is opened
        connect = partial(client_for, source, "--from")
        async with receiving_side(target, "--to") as side:
            link = ZoneLink(
                mask_url(source),
                connect,
                side,
                zone,
                consumer=consumer,
                from_zones=from_zone or (),
                to_zones=to_zone or (),
            )
            with _show_progress(link, as_json):
                if not once:
                    start_logging("console" if sys.stderr.isatty() else "json", "info")
                try:
                    await _run_until_stopped(link, once)
                finally:
                    counts.update(link.report.counts)

    counts: dict[str, int] = {}
    try:
        with refuse_mistakes(as_json), require_extra(as_json):
            asyncio.run(run())
    except OncewardError as error:
        fail(f"{error} ({_summary(counts)}; it is safe to repeat)", as_json)
    except _CutOff as error:
        raise typer.Exit(128 + error.signal) from None
    print_result(dict.fromkeys(WORDS, 0) | counts, f"{_summary(counts)}.", as_json)


@asynccontextmanager
async def receiving_side(target: str, option: str) -> AsyncIterator[Boundary | AsyncBoundaryClient]:
    """A client for a URL; a boundary in this process for a store."""
    from onceward.boundary.boundary import Boundary
    from onceward.boundary.stores import open_store

    if target.startswith(("http://", "https://")):
        async with client_for(target, option) as client:
            yield client
        return
    store = await open_store(target)
    try:
        yield Boundary(store)
    finally:
        await store.close()


class _CutOff(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"cut off by signal {number}")
        self.signal = number


async def _run_until_stopped(link: ZoneLink, once: bool) -> None:
    loop, signals = asyncio.get_running_loop(), list[int]()
    work = asyncio.create_task(link.drain() if once else link.run())

    def on_signal(number: int) -> None:
        signals.append(number)
        link.end()
        if len(signals) > 1:
            work.cancel()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, on_signal, int(each))
    try:
        await work
    except asyncio.CancelledError:
        raise _CutOff(signals[-1]) from None
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)


@contextmanager
def _show_progress(link: ZoneLink, as_json: bool) -> Iterator[None]:
    """Show progress on a terminal."""
    from rich.progress import SpinnerColumn

    with progress_bars(as_json, SpinnerColumn(), "{task.description}") as bars:
        bar = bars.add_task("connecting", total=None)
        watching = asyncio.create_task(_watch(link, partial(bars.update, bar)))
        try:
            yield
        finally:
            watching.cancel()


async def _watch(link: ZoneLink, update: Callable[..., None]) -> None:
    while True:
        update(description=f"up to offset {link.report.frontier:,}: {_summary(link.report.counts)}")
        await asyncio.sleep(REFRESH_SECONDS)


def _summary(counts: dict[str, int]) -> str:
    found = [f"{counts[key]:,} {word}" for key, word in WORDS.items() if counts.get(key)]
    return ", ".join(found) or "nothing new"
