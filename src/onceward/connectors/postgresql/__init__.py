"""A queue in a PostgreSQL database: `PostgreSqlConnector` for threads, `AsyncPostgreSqlConnector` for asyncio.

Needs `onceward[postgres]`. `append_in` puts messages on a queue inside your own transaction, and `creation_script` is
the SQL for a database where only its owner may create tables.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceward.connectors.postgresql.connector import AsyncPostgreSqlConnector, PostgreSqlConnector
    from onceward.connectors.postgresql.schema import creation_script
    from onceward.connectors.postgresql.store import append_in

__all__ = ["AsyncPostgreSqlConnector", "PostgreSqlConnector", "append_in", "creation_script"]

_HOMES = {"append_in": "store", "creation_script": "schema"}


def __getattr__(name: str) -> Any:
    """Load the connectors on first use: the scheme next to them does not need the driver."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'connector')}"), name)
