"""Connections to a PostgreSQL that may go and come back: whoever finds one broken is told, the next gets a new one."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from onceward.boundary.errors import Unavailable
from onceward.errors import ConfigurationError

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

DEFAULTS = {
    "application_name": "onceward-boundary",
    "connect_timeout": 5,
    "target_session_attrs": "read-write",  # of several hosts, the one that is the primary now
    # A machine that is gone says nothing. Without these we would wait for it for a quarter of an hour.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Where the URL says nothing else."""

SETTINGS = {
    "default_transaction_isolation": r"read\ committed",
    # Every query here goes by an index. A plan that was made while a table was small, and is kept, must do so too.
    "enable_seqscan": "off",
    "jit": "off",  # which before version 18 would be called for by what the line above makes the one-row table cost
    # And the server must not wait for a machine of ours that is gone: it would keep the log's lock for it.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "lock_timeout": "20s",  # nor we for ever for another
}
"""Whatever the URL says."""

BE_DURABLE = """
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') <> 'remote_apply'
"""  # that one is stricter


class PostgreSqlConnections:
    """Up to `most` at once, kept for the next who needs one."""

    def __init__(self, url: str, most: int) -> None:
        self._conninfo = _conninfo(url)
        self._free = asyncio.Semaphore(most)
        self._idle: list[Connection] = []
        self._closed = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Connection]:
        """For as long as the caller is inside. Autocommits. Raises `Unavailable` for whatever PostgreSQL refuses."""
        async with self._free:
            try:
                connection = await self._taken()
                try:
                    yield connection
                finally:
                    await self._put_back(connection)
            except psycopg.Error as error:
                raise Unavailable(
                    f"PostgreSQL did not do it, or did not say so: {str(error).strip()}; try again"
                ) from error

    async def _taken(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not _has_spoken(connection):
                return connection
            await connection.close()
        return await self._connected()

    async def _connected(self) -> Connection:
        if self._closed:
            raise Unavailable("this boundary is closing")
        connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
        try:
            await connection.execute(BE_DURABLE)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _put_back(self, connection: Connection) -> None:
        if connection.info.transaction_status == TransactionStatus.IDLE and not self._closed:
            self._idle.append(connection)
        else:
            await connection.close()

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop().close()


def _has_spoken(connection: Connection) -> bool:
    """A server has nothing to say to a connection that asks nothing, but that it goes away."""
    listening = select.poll()
    listening.register(connection.fileno(), select.POLLIN)
    return bool(listening.poll(0))


def _conninfo(url: str) -> str:
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(
            f"the store's URL is none of PostgreSQL, such as postgresql://user@host/database: {str(error).strip()}"
        ) from error
    settings = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
    options = f"{given.get('options') or ''} {settings}".strip()
    told: dict[str, Any] = {**DEFAULTS, **given, "options": options}
    return make_conninfo(**told)
