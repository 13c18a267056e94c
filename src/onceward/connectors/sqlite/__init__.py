"""A durable queue in one SQLite file: `SqliteConnector` for threads, `AsyncSqliteConnector` for asyncio."""

from onceward.connectors.sqlite.connector import AsyncSqliteConnector, SqliteConnector
from onceward.connectors.sqlite.store import DatabaseBusyError

__all__ = ["AsyncSqliteConnector", "DatabaseBusyError", "SqliteConnector"]
