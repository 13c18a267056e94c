"""The database of an app, opened to be inspected: nothing in it is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceward.app.build import database_url
from onceward.connectors.reports import ANSWER_SECONDS, CHECK_SERVER, ServerUnreachable
from onceward.connectors.urls import redact_url
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Connection


@contextmanager
def asking_database(database: str) -> Iterator[Connection | None]:
    """None for a file that does not exist: SQLite would create it."""
    from sqlalchemy import create_engine
    from sqlalchemy.exc import SQLAlchemyError

    from onceward._text import driver_message

    url = database_url(database, asynchronous=False)
    if url.get_backend_name() == "sqlite":
        if not url.database or not Path(url.database).is_file():
            yield None
            return
        arguments: dict[str, Any] = {"timeout": ANSWER_SECONDS}
    else:
        arguments = {"connect_timeout": int(ANSWER_SECONDS), "application_name": "onceward"}
    try:
        engine = create_engine(url, connect_args=arguments)
    except ModuleNotFoundError:
        raise ConfigurationError("PostgreSQL needs psycopg: pip install 'onceward[postgres]'") from None
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise ServerUnreachable(
            f"the database {redact_url(database)} cannot be asked: {driver_message(error)}; {CHECK_SERVER}"
        ) from None
    finally:
        engine.dispose()
