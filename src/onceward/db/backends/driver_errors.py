"""Errors of statements that went to the driver without SQLAlchemy: they become what SQLAlchemy makes of them."""

from __future__ import annotations

from typing import Any, NoReturn

from sqlalchemy import Connection
from sqlalchemy.util import greenlet_spawn


def translate(connection: Connection, error: Exception, sql: str, values: Any) -> NoReturn:
    """Raise SQLAlchemy's error. A broken connection is marked as such."""
    try:
        raise error
    except type(error):
        connection._handle_dbapi_exception(error, sql, values, None, None)


async def translate_async(connection: Connection, error: Exception, sql: str, values: Any) -> NoReturn:
    """The same in asyncio, outside a greenlet."""
    await greenlet_spawn(translate, connection, error, sql, values)
    raise AssertionError("it raises")
