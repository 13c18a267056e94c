"""Poolers, such as PgBouncer, between an engine and PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import event

from onceward.db.calls import CALLS

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")


def expect_poolers(engine: AnyEngine) -> AnyEngine:
    """Let psycopg prepare no statements on connections to a pooler, and return the engine. A pooler may lend another
    connection of the server for each transaction. That one does not know what was prepared on the one before, or it
    knows something else by the same name."""
    plain: Any = getattr(engine, "sync_engine", engine)
    if plain.dialect.driver == "psycopg":
        event.listen(plain, "connect", _check)
    return engine


def _check(connection: Any, record: Any) -> None:
    driver = getattr(connection, "driver_connection", connection)  # SQLAlchemy wraps that of asyncio
    if driver.prepare_threshold is None:
        return
    try:
        with CALLS.call_on(connection):
            if not is_to_server(connection):
                driver.prepare_threshold = None
    except BaseException:
        connection.close()
        raise


def is_to_server(connection: Any) -> bool:
    """Whether nothing is between a connection of psycopg and its server: a pooler makes up the process id that it tells
    a client."""
    before = connection.autocommit
    connection.autocommit = True
    cursor = connection.cursor()
    try:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    finally:
        cursor.close()
    connection.autocommit = before
    return bool(pid == connection.info.backend_pid)
