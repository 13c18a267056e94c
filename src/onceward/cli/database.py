"""How a command opens an inbox's database: its options, and the message if that fails."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward._secrets import mask_url, remember
from onceward._text import driver_message
from onceward.cli.completion import is_completing
from onceward.cli.exit import MISUSED, fail, reason_of, refuse_mistakes
from onceward.errors import ConfigurationError, OncewardError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine import URL

    from onceward.inbox import Inbox

LOCK_SECONDS = 5.0
"""How long to wait for an SQLite file that another process has locked."""

VARIABLE = "ONCEWARD_DATABASE"
ELSEWHERE = f"{VARIABLE}, or database in onceward.toml or pyproject.toml"
"""Where a database is named if no option names it, for the help."""
NO_DATABASE = (
    "no database is named; pass --database sqlite:///shop.db, or set ONCEWARD_DATABASE, or write "
    'database = "sqlite:///shop.db" into onceward.toml here, or under [tool.onceward] of pyproject.toml (a database '
    "that only the code of an app names is not known here)"
)


def default_database() -> str | None:
    """The database that the environment or a file in the working directory names, as for an app without its own."""
    from onceward.app.layers import SECRETS_DIR
    from onceward.app.settings import resolve

    environ = {name: os.environ[name] for name in (VARIABLE, SECRETS_DIR) if name in os.environ}
    return resolve({}, environ).settings.database


def _require_database() -> str:
    if is_completing():  # nothing will be opened, so nothing is missing
        return ""
    with refuse_mistakes(as_json=False):
        found = default_database()
    if found is None:
        fail(NO_DATABASE, False, MISUSED)
    return found


def database_option(help: str, default: str, **more: Any) -> Any:
    """The option `--database`, required or optional."""
    return typer.Option("--database", metavar="URL", show_default=default, help=help, **more)


Database = Annotated[
    str,
    database_option(
        "Database of the inbox: sqlite:///inbox.db or postgresql://user@host/name.",
        ELSEWHERE,
        default_factory=_require_database,
    ),
]


TrustClock = Annotated[
    bool,
    typer.Option("--trust-clock", help="Confirm that the database's clock is right, after you compared it."),
]


@contextmanager
def open_inbox(url: str, as_json: bool, *, is_new: bool = False) -> Iterator[Inbox]:
    """Open the inbox in a database, as `open_engine` does."""
    from onceward.inbox import Inbox

    with open_engine(url, as_json, is_new=is_new) as engine:
        yield Inbox(engine)


@contextmanager
def open_engine(url: str, as_json: bool, *, is_new: bool = False) -> Iterator[Engine]:
    """Open a database and check its tables. Any problem ends the command with one line that says what to do.

    `is_new`: the database may be empty or not exist yet.
    """
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    from onceward.inbox import Inbox

    try:
        with refuse_mistakes(as_json):
            engine = _engine(_parse(url), is_new)
            try:
                if not is_new:
                    Inbox(engine).check_tables()
                yield engine
            finally:
                engine.dispose()
    except OncewardError as error:
        fail(str(error), as_json)
    except DBAPIError as error:
        reason = driver_message(error)
        if _is_unreachable(error):
            fail(f"cannot reach the database {format_url(url)}: {reason}; check that it is running", as_json)
        fail(f"the database {format_url(url)} refused: {reason}", as_json)
    except OverflowError:
        fail("a number is too large for the database; give a smaller one", as_json, MISUSED)
    except UnicodeEncodeError:
        fail(
            "an argument is not UTF-8 text, so the database cannot have it; check how it is typed",
            as_json,
            MISUSED,
        )
    except (SQLAlchemyError, sqlite3.Error) as error:
        fail(f"cannot use the database {format_url(url)}: {error}", as_json)


def format_url(url: str) -> str:
    """The URL without passwords and the driver that was added."""
    return mask_url(re.sub(r"^(\w+)\+\w+(?=://)", r"\1", url))


def dialect_of(url: str) -> str:
    return _parse(url).get_backend_name()


def _parse(url: str) -> URL:
    """Parse a URL, with a driver that onceward installs, whichever driver the URL names."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    from onceward.db.engines import check_sqlite_options

    remember(url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "the database is not a valid URL; write sqlite:///path/to/inbox.db or postgresql://user@host/name"
        ) from None
    drivers = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    name = parsed.drivername.partition("+")[0]
    if name not in drivers:
        raise ConfigurationError(f"an inbox needs sqlite or postgresql, not {name!r}; check the database URL")
    found = parsed.set(drivername=drivers[name])
    if name == "sqlite":
        check_sqlite_options(found)
    return found


def _engine(url: URL, is_new: bool) -> Engine:
    from sqlalchemy import create_engine

    from onceward.db.engines import connect_arguments, hide_values

    if url.get_backend_name() == "sqlite":
        _check_file(url, is_new)
        return hide_values(create_engine(url, connect_args={"timeout": LOCK_SECONDS}))
    try:
        return hide_values(create_engine(url, connect_args=connect_arguments(url, name="onceward")))
    except ModuleNotFoundError:
        raise ConfigurationError("PostgreSQL needs psycopg: pip install 'onceward[postgres]'") from None


def _check_file(url: URL, is_new: bool) -> None:
    """Refuse a missing file: SQLite would create an empty one for a mistyped name."""
    if not url.database or url.database == ":memory:":
        raise ConfigurationError(
            "an in-memory database ends with the command; name a file, as in sqlite:///inbox.db"
        )
    if url.database.startswith("file:"):
        return
    path = Path(url.database).absolute()
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, or with characters that no name has
        raise ConfigurationError(
            f"{path} cannot be opened: {reason_of(error)}; check the database URL"
        ) from None
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"directory {path.parent} does not exist; create it, or check the database URL (an absolute path has four "
            "slashes, as in sqlite:////var/lib/shop.db)"
        )
    if path.is_dir():
        raise ConfigurationError(
            f"{path} is a directory; name a file, as in sqlite:///{url.database}/inbox.db"
        )
    if path.exists() and not path.is_file():
        raise ConfigurationError(f"{path} is not a database file; check the database URL")
    if not is_new and not path.exists():
        raise ConfigurationError(
            f"database {path} does not exist; check the URL, or create it with "
            f"`onceward inbox migrate --database {mask_url(url.render_as_string())}`"
        )


def _is_unreachable(error: Any) -> bool:
    from sqlalchemy.exc import OperationalError

    return isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", None) is None
