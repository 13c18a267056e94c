"""Where a boundary keeps its facts, cursors and objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onceward.boundary.ports import Store
from onceward.task.exceptions import ConfigurationError


async def open_store(url: str) -> Store:
    """A directory (or sqlite:///directory), postgresql://… or nats://…, each by its own driver."""
    scheme, separator, place = url.partition("://")
    if not separator or scheme == "sqlite":
        from onceward.boundary.stores.sqlite import SqliteStore

        directory = place.removeprefix("/") if separator else url
        if not directory:
            raise ConfigurationError(
                f"{url!r} names no directory; say sqlite:///some/directory, or the directory alone"
            )
        return SqliteStore(directory)
    if scheme in ("postgresql", "postgres"):
        with _driver("psycopg", "postgres"):
            from onceward.boundary.stores.postgresql import PostgreSqlStore
        return await PostgreSqlStore.open(url)
    if scheme == "nats":
        with _driver("nats", "nats"):
            from onceward.boundary.stores.jetstream import JetStreamStore
        return await JetStreamStore.open(url)
    raise ConfigurationError(
        f"{url!r} is no store: give a directory, sqlite:///directory, postgresql://host/database or nats://host:port"
    )


@contextmanager
def _driver(package: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigurationError(f"{package} is not installed; pip install 'onceward[{extra}]'") from error
