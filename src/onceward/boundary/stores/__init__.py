"""Stores for a boundary's facts, cursors and objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from onceward.boundary.store import BoundaryStore
from onceward.errors import ConfigurationError


async def open_store(url: str) -> BoundaryStore:
    """Open a directory (or sqlite:///directory), postgresql://…, or nats://…?name=onceward&replicas=3."""
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
        return await JetStreamBoundaryStore.open(servers, **_jetstream_options(query))
    raise ConfigurationError(
        f"{url!r} is not a store: use a directory, sqlite:///directory, postgresql://host/database or nats://host:port"
    )


def directory_of(url: str) -> Path | None:
    """Return the directory of an embedded store; None for a store on a server."""
    scheme, separator, place = url.partition("://")
    if separator and scheme != "sqlite":
        return None
    directory = place.removeprefix("/") if separator else url
    if not directory:
        raise ConfigurationError(
            f"{url!r} does not name a directory; write sqlite:///some/directory, or just the directory"
        )
    return Path(directory)


def check_exists(url: str) -> None:
    """Call before reading: a missing directory would be created, and look like an empty boundary."""
    directory = directory_of(url)
    if directory is not None and not (directory / "boundary.db").is_file():
        raise ConfigurationError(
            f"there is no boundary in {str(directory)!r}, which has no boundary.db; use the data directory of its "
            "server"
        )


def _jetstream_options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    unknown = options.keys() - {"name", "replicas"}
    if unknown:
        raise ConfigurationError(
            f"a nats:// store has the options name and replicas, not {', '.join(sorted(unknown))}"
        )
    if "replicas" in options:
        if not options["replicas"].isdecimal():
            raise ConfigurationError(f"replicas must be an integer, not {options['replicas']!r}")
        options["replicas"] = int(options["replicas"])
    return options


@contextmanager
def _driver(package: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigurationError(f"{package} is not installed; pip install 'onceward[{extra}]'") from error
