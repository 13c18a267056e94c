"""How a command gets at an inbox: its options, what it opens, and what it says when that fails."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward.cli.completion import is_completing
from onceward.cli.exit import MISUSED, fail

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine import URL

    from onceward.inbox import Inbox

CONNECT_SECONDS = 10
LOCK_SECONDS = 5.0
"""How long an SQLite file may be locked by somebody else."""

VARIABLE = "ONCEWARD_DATABASE"
ELSEWHERE = f"{VARIABLE}, or database in onceward.toml or pyproject.toml"
"""Where a database is named that no option names, for the help."""


def default_database() -> str | None:
    """What the environment names, or a file of the working directory: as an app has it that names none itself."""
    from onceward.app.settings import resolve

    environ = {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
    return resolve({}, environ).settings.database


def _needed_database() -> str:
    from onceward.errors import ConfigurationError

    if is_completing():  # nothing will be opened, and nobody wants to be told anything
        return ""
    try:
        found = default_database()
    except ConfigurationError as error:
        fail(str(error), False, MISUSED)
    if found is None:
        fail(NO_DATABASE, False, MISUSED)
    return found


NO_DATABASE = (
    "no database is named; give --database sqlite:///shop.db, or set ONCEWARD_DATABASE, or write "
    'database = "sqlite:///shop.db" into onceward.toml here, or under [tool.onceward] of pyproject.toml (what only the '
    "code of an app names is not known here)"
)


def database_option(help: str, default: str, **more: Any) -> Any:
    """`--database`, for a command that needs one or may do without."""
    return typer.Option("--database", metavar="URL", show_default=default, help=help, **more)


Database = Annotated[
    str,
    database_option(
        "The database of the inbox: sqlite:///inbox.db, or postgresql://user@host/name.",
        ELSEWHERE,
        default_factory=_needed_database,
    ),
]


@contextmanager
def opened(url: str, as_json: bool, *, is_new: bool = False) -> Iterator[Inbox]:
    """The inbox in a database. Whatever is wrong with it ends the command with one line that says what to do.

    `is_new`: it may be empty, or not be there yet.
    """
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    from onceward._text import driver_message
    from onceward.errors import ConfigurationError, OncewardError
    from onceward.inbox import Inbox

    try:
        engine = _engine(_parsed(url), is_new)
        try:
            inbox = Inbox(engine)
            if not is_new:
                inbox.check_tables()
            yield inbox
        finally:
            engine.dispose()
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    except OncewardError as error:
        fail(str(error), as_json)
    except DBAPIError as error:
        reason = driver_message(error)
        if _is_unreachable(error):
            fail(f"the database {shown(url)} cannot be reached: {reason}; see that it runs", as_json)
        fail(f"the database {shown(url)} refused: {reason}", as_json)
    except (SQLAlchemyError, sqlite3.Error) as error:
        fail(f"the database {shown(url)} cannot be used: {error}", as_json)


def shown(url: str) -> str:
    """Without its password, and without the driver that we have chosen."""
    parsed = _parsed(url)
    return parsed.set(drivername=parsed.get_backend_name()).render_as_string(hide_password=True)


def dialect_of(url: str) -> str:
    return _parsed(url).get_backend_name()


def _parsed(url: str) -> URL:
    """With a driver that we have, whichever the program uses that the URL was written for."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    from onceward.errors import ConfigurationError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "the database is no URL; write sqlite:///path/to/inbox.db or postgresql://user@host/name"
        ) from None
    drivers = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    name = parsed.drivername.partition("+")[0]
    if name not in drivers:
        raise ConfigurationError(
            f"an inbox is in sqlite or postgresql, not in {name!r}; mend the database's URL"
        )
    return parsed.set(drivername=drivers[name])


def _engine(url: URL, is_new: bool) -> Engine:
    from sqlalchemy import create_engine

    from onceward.errors import ConfigurationError

    if url.get_backend_name() == "sqlite":
        _check_file(url, is_new)
        return create_engine(url, connect_args={"timeout": LOCK_SECONDS})
    try:
        return create_engine(
            url, connect_args={"connect_timeout": CONNECT_SECONDS, "application_name": "onceward"}
        )
    except ModuleNotFoundError:
        raise ConfigurationError("PostgreSQL needs psycopg: pip install 'onceward[postgres]'") from None


def _check_file(url: URL, is_new: bool) -> None:
    """SQLite would make an empty file of a mistyped name."""
    from onceward.errors import ConfigurationError

    if not url.database or url.database == ":memory:":
        raise ConfigurationError(
            "a database in memory ends with the command; name a file, as in sqlite:///inbox.db"
        )
    if url.database.startswith("file:"):
        return
    path = Path(url.database).absolute()
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"there is no directory {path.parent}; make it, or mend the database's URL (an absolute path has four "
            "slashes, as in sqlite:////var/lib/shop.db)"
        )
    if path.is_dir():
        raise ConfigurationError(
            f"{path} is a directory; name a file, as in sqlite:///{url.database}/inbox.db"
        )
    if not is_new and not path.is_file():
        raise ConfigurationError(
            f"there is no file {path}; mend the database's URL, or have it made with "
            f"`onceward inbox migrate --database {url.render_as_string()}`"
        )


def _is_unreachable(error: Any) -> bool:
    from sqlalchemy.exc import OperationalError

    return isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", None) is None
