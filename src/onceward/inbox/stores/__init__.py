"""Where an inbox stores its rows: `base.py` has what all databases share, the other files what differs."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.engine import Dialect

from onceward.errors import ConfigurationError
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.postgresql import PostgreSqlStore
from onceward.inbox.stores.sqlite import SqliteStore

_STORES: dict[str, type[Store]] = {"sqlite": SqliteStore, "postgresql": PostgreSqlStore}


def store_of(dialect: Dialect, clock: Callable[[], float] | None = None) -> Store:
    store = _STORES.get(dialect.name)
    if store is None:
        raise ConfigurationError(
            f"an inbox works on {' and '.join(_STORES)}, not on {dialect.name!r}; use an engine for one of these"
        )
    return store(clock)
