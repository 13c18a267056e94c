"""Open the database of an app to inspect it, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from onceward._secrets import mask_url
from onceward.app.build import database_url
from onceward.connectors.reports import ANSWER_SECONDS, CHECK_SERVER, ServerUnreachable
from onceward.errors import ConfigurationError
from onceward.inspection.database_doubts import sqlite_file

if TYPE_CHECKING:
    from sqlalchemy import Connection


@contextmanager
def open_database(database: str) -> Iterator[Connection | None]:
    """Connect to it; None for a SQLite file that does not exist, because SQLite would create it.

    Errors inside the block, too, become `ServerUnreachable`.
    """
    from sqlalchemy import create_engine
    from sqlalchemy.exc import SQLAlchemyError

    from onceward._text import driver_message
    from onceward.db.engines import DatabaseTimeouts, connect_arguments
    from onceward.db.poolers import expect_poolers

    url = database_url(database, asynchronous=False)
    if url.get_backend_name() == "sqlite":
        path = sqlite_file(url)
        if path is None or not path.exists():
            yield None
            return
        arguments: dict[str, Any] = {"timeout": ANSWER_SECONDS}
    else:
        arguments = connect_arguments(url, DatabaseTimeouts(ANSWER_SECONDS), name="onceward")
    try:
        engine = expect_poolers(create_engine(url, connect_args=arguments))
    except ModuleNotFoundError:
        raise ConfigurationError("PostgreSQL needs psycopg: pip install 'onceward[postgres]'") from None
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise ServerUnreachable(
            f"cannot query database {mask_url(database)}: {driver_message(error)}; {CHECK_SERVER}"
        ) from None
    finally:
        engine.dispose()


def accepted_connections(connection: Connection) -> int:
    """How many connections PostgreSQL accepts from all clients that are not superusers."""
    most, reserved = (
        int(connection.exec_driver_sql(f"SHOW {name}").scalar_one())
        for name in ("max_connections", "superuser_reserved_connections")
    )
    return most - reserved
