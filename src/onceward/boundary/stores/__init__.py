"""Stores for a boundary's facts, cursors and objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from onceward._secrets import mask_url, remember
from onceward.boundary.store import BoundaryStore
from onceward.errors import ConfigurationError

STORES = "use a directory, sqlite:///directory, postgresql://host/database or nats://host:port"

_SCHEME = re.compile(r"(sqlite|postgres|postgresql|nats|tls|http|https|file)(\+\w+)?:", re.IGNORECASE)


async def open_store(url: str) -> BoundaryStore:
    """Open a directory (or sqlite:///directory), postgresql://…, or nats://…?name=onceward&replicas=3."""
    remember(url)
    directory = directory_of(url)
    if directory is not None:
        from onceward.boundary.stores.sqlite import SqliteBoundaryStore

        return SqliteBoundaryStore(directory)
    scheme = url.partition("://")[0]
    if scheme in ("postgresql", "postgres"):
        with _driver("psycopg", "postgres"):
            from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore
        return await PostgreSqlBoundaryStore.open(url)
    if scheme == "nats":
        with _driver("nats", "nats"):
            from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
        servers, _, query = url.partition("?")
        _check_servers(servers)
        return await JetStreamBoundaryStore.open(servers, **_jetstream_options(query))
    raise ConfigurationError(f"{scheme!r:.40} is not the scheme of a store; {STORES}")


def directory_of(url: str) -> Path | None:
    """Return the directory of an embedded store; None for a store on a server."""
    scheme, separator, place = url.partition("://")
    if separator and scheme != "sqlite":
        return None
    directory = place.removeprefix("/") if separator else url
    if not directory.strip("/ \t\r\n") or not directory.isprintable():
        raise ConfigurationError(
            f"{mask_url(url)!r} does not name a directory; write sqlite:///some/directory, or just the directory"
        )
    if not separator and _SCHEME.match(url):
        raise ConfigurationError(f"{url.partition(':')[0]!r} is a scheme, which needs two slashes; {STORES}")
    return Path(directory)


def check_exists(url: str) -> None:
    """Call before reading: a missing directory would be created, and look like an empty boundary."""
    directory = directory_of(url)
    if directory is not None and not _is_file(directory / "boundary.db"):
        raise ConfigurationError(
            f"there is no boundary in {mask_url(url)!r}, which has no boundary.db; use the data directory of its "
            "server"
        )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with characters that no name has
        return False


def _check_servers(url: str) -> None:
    """The client fails with an assertion, or never, if one of the servers has no host or no valid port."""
    for server in url.partition("://")[2].split(","):
        try:
            parts = urlsplit(f"nats://{server.partition('://')[2] or server}")
            is_usable = bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ConfigurationError(
                "the store's URL does not name a NATS server; write nats://host:port, or nats://one:4222,two:4222"
            )


def _jetstream_options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    unknown = options.keys() - {"name", "replicas", "monitoring"}
    if unknown:
        raise ConfigurationError(
            f"a nats:// store has the options name, replicas and monitoring, not {', '.join(sorted(unknown))}"
        )
    for name in options.keys() & {"replicas", "monitoring"}:
        if not options[name].isdecimal():
            raise ConfigurationError(f"{name} must be an integer, not {options[name]!r}")
        options[name] = int(options[name])
    return options


@contextmanager
def _driver(package: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigurationError(f"{package} is not installed; pip install 'onceward[{extra}]'") from error
