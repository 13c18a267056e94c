"""The parts of a server behind its port: retention, links, peers, and the configuration, which is reloaded.

The configuration and the TLS files are checked every second. Peers and links change at once, certificates with the
next handshake. What cannot be used is logged, and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import msgspec

from onceward.boundary.boundary import Boundary
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.links.manager import Links, LinkSettings
from onceward.boundary.retention import Retention
from onceward.boundary.server.access import Guard, Peers
from onceward.boundary.server.config import Config, read_config
from onceward.boundary.tls import ServerTls, Tls
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.logs import log_to

_log = OwnLogger(logging.getLogger("onceward.boundary"))

CHECK_EVERY = 1.0
"""Seconds between two checks of the files."""
RELOADED = ("tls", "peers", "links")
"""What changes in the configuration without a restart."""
LOG_FIELDS = ("message_id", "offset", "consumer", "zone", "link", "outcome")
"""Records name these in `extra`; those that are set are added to the log line."""

Renew = Callable[[tuple[bytes, bytes, bytes]], Awaitable[None]]
"""Takes CA, certificate and key in PEM."""
Stamp = tuple[int, ...] | None
"""Changes whenever the file does; None for a missing file."""


@asynccontextmanager
async def running(
    boundary: Boundary,
    config: Config,
    *,
    consumers: Iterable[str] = (),
    path: Path | None = None,
    renew: Renew | None = None,
    check_every: float = CHECK_EVERY,
    broken: Callable[[], object] = lambda: None,
) -> AsyncIterator[Live]:
    """Run all parts of a server but the port. `path` is the file of the configuration, if it came from one.

    `renew` passes new certificates on. `broken` is called if retention or the configuration watch ends by itself: the
    server should not run without them.
    """
    async with AsyncExitStack() as stack:
        retention = Retention(boundary)
        _must_run(retention.start(), broken)
        stack.push_async_callback(retention.close)
        for name in (*config.consumers, *consumers):
            await boundary.register(name)
        live = Live(boundary, config, path, renew)
        live.links.start()
        stack.push_async_callback(live.links.close)
        if path is not None:
            watch = asyncio.create_task(live.watch(check_every), name="onceward-boundary-configuration")
            _must_run(watch, broken)
            stack.push_async_callback(_cancel, watch)
        yield live


def start_logging(form: str, level: str, stream: TextIO | None = None) -> None:
    """Log to `stream`, stderr by default, as `json` or for the `console`.

    `level` is for onceward's own loggers. Libraries log warnings and above: at lower levels they report every byte.
    """
    root = log_to(stream, form, fields)
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("onceward").setLevel(level.upper())


def fields(record: logging.LogRecord) -> dict[str, Any]:
    found = {name: getattr(record, name, None) for name in LOG_FIELDS}
    return {name: value for name, value in found.items() if value is not None}


class Live:
    """What can change while a server runs."""

    def __init__(
        self, boundary: Boundary, config: Config, path: Path | None, renew: Renew | None = None
    ) -> None:
        self._started = self._config = config
        self._path = path
        self._directory = path.parent if path is not None else Path()
        self._stamps = self._current_stamps()
        self._changing = self._stamps
        self._problems: tuple[str, ...] = ()
        files = config.files(self._directory)
        self._renewed = _stamps(files)
        self._tls = ServerTls(boundary.metrics)
        self._renew = renew
        self._peers = Peers(config.peers)
        self.guard = None if files is None else Guard(self._peers, boundary.metrics)
        """Checks callers, where there is TLS."""
        if files is not None:
            self._tls.report(files)
        self.links = Links(boundary, config.zone or "", self._link_settings())
        self._plain: set[tuple[str, str]] = set()
        self._warn_of_plain_links()
        if files is not None and not config.peers:
            _log.warning("%s has no [[peers]]: this server refuses every call", path)

    async def watch(self, check_every: float) -> None:
        while True:
            await asyncio.sleep(check_every)
            await self.reload_if_changed()

    async def reload_if_changed(self) -> None:
        """Reload changed files, but only once two checks find them the same: one may still be being written."""
        stamps = self._current_stamps()
        if stamps == self._stamps and not self._problems:
            return
        if stamps != self._changing:
            self._changing = stamps
            return
        self._stamps = stamps
        problems = tuple([each async for each in self._reload()])
        for each in problems:
            if each not in self._problems:
                _log.error("%s; keeping the previous configuration", each, extra={"outcome": "not_read"})
        if not problems:
            _log.info("reloaded %s and its certificates", self._path, extra={"outcome": "read"})
        self._problems = problems

    async def _reload(self) -> AsyncIterator[str]:
        """Yield the problems. Parts are independent: a broken certificate does not keep a removed peer in the table."""
        assert self._path is not None
        try:
            config = read_config(self._path)
            if (config.tls is None) != (self.guard is None):
                raise ConfigurationError(f"{self._path}: adding or removing [tls] requires a restart")
            self._peers.replace(config.peers)
            self._warn_of_other_changes(config)
            self._config = config
        except ConfigurationError as error:
            yield str(error)
        try:
            files = self._config.files(self._directory)
            if files is not None and (stamps := _stamps(files)) != self._renewed:
                pem = self._tls.checked(files)
                if self._renew is not None:
                    await self._renew(pem)
                self._tls.report(files)
                self._renewed = stamps
        except ConfigurationError as error:
            yield str(error)
        try:
            await self.links.update(self._link_settings())
            self._warn_of_plain_links()
        except ConfigurationError as error:
            yield f"{self._path}: [[links]]: {error}"

    def _warn_of_other_changes(self, config: Config) -> None:
        for name in Config.__struct_fields__:
            if name not in RELOADED and getattr(config, name) != getattr(self._config, name):
                _log.warning("%s: %s has changed, which requires a restart", self._path, name)

    def _warn_of_plain_links(self) -> None:
        """Once for each, until it is removed or has another URL."""
        if self.guard is None:
            return
        links = [(each.name, each.url) for each in self._config.links]
        plain = [each for each in links if urlsplit(each[1]).scheme == "http"]
        for each in plain:
            if each not in self._plain:
                _log.warning(
                    "link %s uses http:// beside [tls]: its facts travel in plain text, and nothing proves who "
                    "answers; use https://",
                    each[0],
                )
        self._plain = set(plain)

    def _link_settings(self) -> list[LinkSettings]:
        files = self._config.files(self._directory)
        return [
            LinkSettings(**msgspec.structs.asdict(link), client=_client(link.url, files))
            for link in self._config.links
        ]

    def _current_stamps(self) -> tuple[Stamp, ...]:
        return (
            () if self._path is None else (_stamp(self._path), *_stamps(self._config.files(self._directory)))
        )


@dataclass(frozen=True)
class _SecuredClient:
    """Makes clients that show this server's own certificate. Unequal if the files are others or have changed, which
    restarts the link."""

    url: str
    files: Tls
    stamps: tuple[Stamp, ...]

    def __call__(self) -> AsyncBoundaryClient:
        return AsyncBoundaryClient(self.url, tls=self.files)


def _client(url: str, files: Tls | None) -> _SecuredClient | None:
    if files is None or urlsplit(url).scheme != "https":
        return None
    return _SecuredClient(url, files, _stamps(files))


def _stamps(files: Tls | None) -> tuple[Stamp, ...]:
    return () if files is None else (_stamp(files.ca), _stamp(files.cert), _stamp(files.key))


def _stamp(path: str | os.PathLike[str]) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _must_run(task: asyncio.Task[None], broken: Callable[[], object]) -> None:
    """Call `broken` if the task ends without being canceled: facts that never expire, or removed peers that still
    have access, would be noticed too late."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            _log.error("%s ended unexpectedly", task.get_name(), exc_info=task.exception())
            broken()

    task.add_done_callback(ended)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
