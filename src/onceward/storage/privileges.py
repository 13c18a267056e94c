"""What a role of the database may do. PostgreSQL refuses what it may not, and to wait would not help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from onceward.errors import ConfigurationError

NO_PRIVILEGE = "42501"


def is_denied(error: DBAPIError) -> bool:
    """Whether the database refuses for lack of a privilege."""
    return getattr(error.orig, "sqlstate", None) == NO_PRIVILEGE


@contextmanager
def writing_our_tables() -> Iterator[None]:
    """Raise ConfigurationError if the role may not."""
    try:
        yield
    except DBAPIError as error:
        if not is_denied(error):
            raise
        words = str(error.orig).partition("\n")[0]
        raise ConfigurationError(
            f"the role of this database URL may not write to the tables of onceward: {words}. Use the role that owns "
            "these tables, or make this one a member of it (GRANT owner TO role); it must also be allowed to create "
            "tables in their schema (GRANT CREATE ON SCHEMA … TO role)"
        ) from error
