"""Connections to a PostgreSQL that may go away and come back: a broken one raises once, and the next call gets a new
one."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from onceward._secrets import mask
from onceward.boundary.errors import Unavailable
from onceward.errors import ConfigurationError

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

DEFAULTS = {
    "application_name": "onceward-boundary",
    "connect_timeout": 5,
    "target_session_attrs": "read-write",  # of several hosts, the current primary
    # A machine that is gone sends nothing. Without these we would wait for it for a quarter of an hour.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Unless the URL says otherwise."""

LIMITS = {"statement_timeout": "30s"}
"""Settings of the session, unless the URL says otherwise. Every statement here is short."""

SETTINGS = {
    "default_transaction_isolation": r"read\ committed",
    # Every query here uses an index. A cached plan from when a table was small must do so too.
    "enable_seqscan": "off",
    "jit": "off",  # before version 18 the line above raises the cost of the one-row table enough to trigger it
    # The server must not wait for a client machine that is gone: it would hold the log's lock for it.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "lock_timeout": "20s",  # and we must not wait forever for another client
}
"""Whatever the URL says."""

BE_DURABLE = """
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') <> 'remote_apply'
"""  # that one is stricter


class PostgreSqlConnections:
    """A pool of up to `most` connections."""

    def __init__(self, url: str, most: int) -> None:
        self._conninfo = _conninfo(url)
        self._free = asyncio.Semaphore(most)
        self._idle: list[Connection] = []
        self._closed = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Connection]:
        """Lend a connection while inside. Autocommits. Raise `Unavailable` for every PostgreSQL error."""
        async with self._free:
            try:
                connection = await self._take()
                try:
                    yield connection
                finally:
                    await self._put_back(connection)
            except psycopg.Error as error:
                raise Unavailable(
                    f"PostgreSQL failed, or did not answer: {mask(one_line(error))}; try again"
                ) from error

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not _is_closing(connection):
                return connection
            await connection.close()
        return await self._connect()

    async def _connect(self) -> Connection:
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


def one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())


def _is_closing(connection: Connection) -> bool:
    """The only thing a server sends on an idle connection is that it goes away."""
    listening = select.poll()
    listening.register(connection.fileno(), select.POLLIN)
    return bool(listening.poll(0))


def _conninfo(url: str) -> str:
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        problem = str(error).partition('"')[0].strip(": \n")  # then it quotes the URL, with the password
        raise ConfigurationError(
            f"the store's URL is not a PostgreSQL URL, such as postgresql://user@host/database: {problem}"
        ) from None
    options = " ".join(
        filter(None, (_settings(LIMITS), str(given.get("options") or ""), _settings(SETTINGS)))
    )
    merged: dict[str, Any] = {**DEFAULTS, **given, "options": options}
    return make_conninfo(**merged)


def _settings(settings: dict[str, str]) -> str:
    return " ".join(f"-c {name}={value}" for name, value in settings.items())
