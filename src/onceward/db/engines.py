"""Engines that onceward opens itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

from sqlalchemy import event
from sqlalchemy.exc import ArgumentError

from onceward._files.private import create_file
from onceward.db.poolers import expect_poolers
from onceward.errors import ConfigurationError
from onceward.telemetry.redaction import scrub

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")


class DatabaseTimeouts(NamedTuple):
    """How long a connection to PostgreSQL waits for what does not come."""

    connect: float = 10.0
    silence: float = 20.0
    """For a machine or network that is gone: it sends nothing, and would be waited for a quarter of an hour."""


DEFAULT_TIMEOUTS = DatabaseTimeouts()


def connect_arguments(
    url: URL,
    timeouts: DatabaseTimeouts = DEFAULT_TIMEOUTS,
    *,
    name: str | None = None,
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Return what `create_engine` passes to the driver, or `create_async_engine`. For PostgreSQL, what the URL or a
    variable says wins, and the server shows `name` as the application.

    No `statement_timeout`: how long a statement of a handler may take is for its policy to say.
    """
    if url.drivername == "sqlite+aiosqlite":
        from onceward.db.backends.sqlite_asyncio import LoopConnection

        return {"async_creator_fn": LoopConnection}
    if url.get_backend_name() != "postgresql":
        return {}
    arguments: dict[str, Any] = {} if name is None else {"application_name": name}
    if asynchronous and url.get_driver_name() == "psycopg":
        from onceward.db.backends import postgresql_asyncio

        arguments["async_creator_fn"] = postgresql_asyncio.WatchedConnection.connect
    arguments |= {
        "connect_timeout": max(ceil(timeouts.connect), 2),  # libpq takes 1 for 2
        "keepalives_idle": max(ceil(timeouts.silence / 2), 1),
        "keepalives_interval": max(int(timeouts.silence / 6), 1),
        "keepalives_count": 3,
        "tcp_user_timeout": ceil(timeouts.silence * 1000),
    }
    given = {*url.query, *(("connect_timeout",) if "PGCONNECT_TIMEOUT" in os.environ else ())}
    return {name: value for name, value in arguments.items() if name not in given}


SQLITE_OPTIONS = (
    "timeout",
    "isolation_level",
    "detect_types",
    "check_same_thread",
    "cached_statements",
    "uri",
)
"""What the driver takes from a URL. With uri=true, SQLite itself takes anything."""


def unknown_sqlite_options(url: URL) -> list[str]:
    """Those that would be ignored, with a warning."""
    return [] if url.query.get("uri") else [name for name in url.query if name not in SQLITE_OPTIONS]


def check_sqlite_options(url: URL) -> None:
    """Refuse an option such as `timeout=abc`, which SQLAlchemy converts when an engine is created."""
    if unknown := unknown_sqlite_options(url):
        raise ConfigurationError(f"the database's URL has an unknown setting {unknown[0]}; remove it")
    try:
        url.get_dialect()().create_connect_args(url)
    except (ArgumentError, ValueError) as error:
        raise ConfigurationError(f"an option of the database's URL cannot be used: {error}") from None


def hide_values(engine: AnyEngine) -> AnyEngine:
    """Let errors of this engine show no parameters and no rows, from the moment the database raises them, let only the
    owner read the file of a new SQLite database, and let it work behind a pooler of PostgreSQL."""
    plain: Any = getattr(engine, "sync_engine", engine)
    plain.hide_parameters = True
    event.listen(plain, "handle_error", _scrub_errors)
    keep_private(plain)
    return expect_poolers(engine)


def keep_private(engine: Engine) -> None:
    """Create the file of a SQLite database that does not exist yet, before SQLite does: only its owner may read it."""
    if engine.dialect.name == "sqlite" and not event.contains(engine, "do_connect", _create_file):
        event.listen(engine, "do_connect", _create_file)


def begin_before_savepoints(engine: AnyEngine) -> AnyEngine:
    """Open a transaction for a savepoint that is the first statement in it. Python's sqlite3 does not, so SQLite would
    commit when the savepoint ends, although the transaction may be rolled back."""
    plain: Any = getattr(engine, "sync_engine", engine)
    if plain.dialect.name == "sqlite":
        event.listen(plain, "savepoint", _begin)
    return engine


def _begin(connection: Connection, _name: str | None) -> None:
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction and driver.isolation_level is not None:
        cursor = connection.connection.cursor()
        cursor.execute(f"BEGIN {driver.isolation_level}")
        cursor.close()


def _create_file(dialect: Any, record: Any, arguments: Sequence[Any], parameters: dict[str, Any]) -> None:
    path = str(arguments[0]) if arguments else ""
    if parameters.get("uri") and path.startswith("file:"):
        path, _, query = path.removeprefix("file:").partition("?")
        if dict(parse_qsl(query)).get("mode", "rwc") != "rwc":
            return
        path = unquote(path)
    if path not in ("", ":memory:"):
        create_file(path)


def _scrub_errors(context: Any) -> None:
    scrub(context.sqlalchemy_exception or context.original_exception)
