"""Cursors that a handler has opened, and may leave unread."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Any
from weakref import WeakSet


class OpenReads:
    """The cursors of one guest.

    One that is not read to its end keeps SQLite's lock beyond a rollback, for as long as something refers to it, such
    as the traceback of an error. Cursors of psycopg end with the transaction.
    """

    def __init__(self) -> None:
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()
        self._streams: list[Any] = []
        """Of SQLAlchemy's asyncio, without weak references; its other cursors have read everything."""

    def add(self, cursor: Any) -> None:
        if isinstance(cursor, sqlite3.Cursor):
            self._cursors.add(cursor)
        elif getattr(cursor, "server_side", False) and "sqlite" in type(cursor).__module__:
            self._streams.append(cursor)

    def close(self) -> None:
        """Close them. Under asyncio, the caller runs in a greenlet of SQLAlchemy."""
        streams, self._streams = self._streams, []
        for each in [*self._cursors, *streams]:
            with suppress(sqlite3.ProgrammingError, ValueError):  # the connection is closed already
                each.close()
