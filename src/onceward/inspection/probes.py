"""Servers that are asked about themselves, by commands that look and change nothing."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceward.app.build import database_url
from onceward.connectors.urls import Address, boundary_of, shown_url
from onceward.errors import ConfigurationError, OncewardError

if TYPE_CHECKING:
    from sqlalchemy import Connection

SECONDS = 5.0
"""How long a server may take to answer."""
WHAT_TO_DO = "see that it runs, and that its URL is right"


class ServerUnreachable(OncewardError):
    """A server does not answer, or refuses what it is asked."""


@contextmanager
def asking_redis(server: str) -> Iterator[Any]:
    """A client of bytes."""
    try:
        from redis import Redis
        from redis.exceptions import RedisError
    except ModuleNotFoundError:
        raise ConfigurationError("this source needs redis: pip install 'onceward[redis]'") from None

    client = Redis.from_url(server, socket_timeout=SECONDS, socket_connect_timeout=SECONDS)
    try:
        yield client
    except (RedisError, OSError) as error:
        place = server.rpartition("@")[2].removeprefix("redis://").removeprefix("rediss://")
        raise ServerUnreachable(
            f"Redis at {place} cannot be asked: {str(error).rstrip('.')}; {WHAT_TO_DO}"
        ) from None
    finally:
        client.close()


def ask_boundary(source: Address) -> dict[str, Any]:
    """What its page /stats says."""
    from http.client import HTTPException
    from urllib.request import urlopen

    page = f"{boundary_of(source)}/stats"
    try:
        with urlopen(page, timeout=SECONDS, context=_trust(source)) as answer:
            stats: dict[str, Any] = json.load(answer)
            stats["first"], stats["last"], stats["consumers"]
            return stats
    except (OSError, HTTPException) as error:
        raise ServerUnreachable(
            f"{page} cannot be read: {getattr(error, 'reason', error)}; {WHAT_TO_DO}"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise ServerUnreachable(f"{page} does not answer as a boundary does; mend its URL") from None


def _trust(source: Address) -> ssl.SSLContext | None:
    if source.scheme != "boundary+https":
        return None
    context = ssl.create_default_context(cafile=source.settings.get("ca"))
    if "cert" in source.settings:
        context.load_cert_chain(source.settings["cert"], source.settings["key"])
    return context


@contextmanager
def asking_database(database: str) -> Iterator[Connection | None]:
    """None for a file that is not there: SQLite would make it."""
    from sqlalchemy import create_engine
    from sqlalchemy.exc import SQLAlchemyError

    from onceward._text import driver_message

    url = database_url(database, asynchronous=False)
    if url.get_backend_name() == "sqlite":
        if not url.database or not Path(url.database).is_file():
            yield None
            return
        arguments: dict[str, Any] = {"timeout": SECONDS}
    else:
        arguments = {"connect_timeout": int(SECONDS), "application_name": "onceward"}
    try:
        engine = create_engine(url, connect_args=arguments)
    except ModuleNotFoundError:
        raise ConfigurationError("PostgreSQL needs psycopg: pip install 'onceward[postgres]'") from None
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise ServerUnreachable(
            f"the database {shown_url(database)} cannot be asked: {driver_message(error)}; {WHAT_TO_DO}"
        ) from None
    finally:
        engine.dispose()
