"""A durable queue in a SQLite file: `SqliteConnector` for threads, `AsyncSqliteConnector` for asyncio.

`append_in` puts messages on a named queue inside your own transaction.
"""

from typing import TYPE_CHECKING, Any

from onceward.connectors.sqlite.connector import AsyncSqliteConnector, SqliteConnector
from onceward.connectors.sqlite.database import DatabaseBusyError

if TYPE_CHECKING:
    from onceward.connectors.sqlite.join import append_in

__all__ = ["AsyncSqliteConnector", "DatabaseBusyError", "SqliteConnector", "append_in"]


def __getattr__(name: str) -> Any:
    """Load it on first use: a queue of its own needs no SQLAlchemy."""
    if name != "append_in":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onceward.connectors.sqlite.join import append_in

    return append_in
