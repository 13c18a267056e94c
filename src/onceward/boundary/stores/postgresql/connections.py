"""Connections to a PostgreSQL that may go away and come back: a broken one raises once, and the next call gets a new
one."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.waiting import wait_async

from onceward._secrets import mask
from onceward.boundary.errors import Unavailable
from onceward.errors import ConfigurationError

T = TypeVar("T")

CANCEL_WAIT = 5.0
"""Seconds in which the server must take the wish to cancel a query."""

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


class StoreConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Leaves a query at once when its caller is canceled. psycopg's would first wait up to ten seconds for a server
    that hangs, and the call would miss its deadline."""

    async def wait(self, gen: PQGen[T], interval: float = 0.1, *args: Any, **options: Any) -> T:
        return await wait_async(gen, self.pgconn.socket, interval, *args, **options)


class PostgreSqlConnections:
    """A pool of up to `most` connections."""

    def __init__(self, url: str, most: int) -> None:
        self._conninfo = _conninfo(url)
        self._free = asyncio.Semaphore(most)
        self._idle: list[StoreConnection] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[StoreConnection]:
        """Lend a connection while inside. Autocommits. Raise `Unavailable` for every PostgreSQL error."""
        await self._free.acquire()
        left = None
        try:
            connection = await self._take()
            try:
                yield connection
            finally:
                if connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
                    left = connection
                else:
                    await self._put_back(connection)
        except psycopg.Error as error:
            raise Unavailable(
                f"PostgreSQL failed, or did not answer: {mask(one_line(error))}; try again"
            ) from error
        finally:
            if left is None:
                self._free.release()
            else:
                self._leave(left)

    async def _take(self) -> StoreConnection:
        while self._idle:
            connection = self._idle.pop()
            if not _is_closing(connection):
                return connection
            await connection.close()
        return await self._connect()

    async def _connect(self) -> StoreConnection:
        if self._closed:
            raise Unavailable("this boundary is closing")
        connection = await StoreConnection.connect(self._conninfo, autocommit=True)
        try:
            await connection.execute(BE_DURABLE)
            [(pid,)] = await (await connection.execute("SELECT pg_backend_pid()")).fetchall()
            if pid != connection.info.backend_pid:
                connection.prepare_threshold = None  # there is a pooler: see onceward.db.poolers
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _put_back(self, connection: StoreConnection) -> None:
        if connection.info.transaction_status == TransactionStatus.IDLE and not self._closed:
            self._idle.append(connection)
        else:
            await connection.close()

    def _leave(self, connection: StoreConnection) -> None:
        """Cancel the query behind the caller's back. The connection counts until then, so a slow server does not get
        more and more of them."""

        async def cancel() -> None:
            with suppress(psycopg.Error):
                await connection.cancel_safe(timeout=CANCEL_WAIT)

        def end(leaving: asyncio.Task[None]) -> None:  # also of one that was canceled before it began
            connection.pgconn.finish()
            self._free.release()
            self._leaving.discard(leaving)

        leaving = asyncio.create_task(cancel())
        self._leaving.add(leaving)
        leaving.add_done_callback(end)

    async def close(self) -> None:
        self._closed = True
        for each in self._leaving:
            each.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        while self._leaving:  # of one that is done, the connection ends in the next turn of the loop
            await asyncio.sleep(0)
        while self._idle:
            await self._idle.pop().close()


def one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())


def _is_closing(connection: StoreConnection) -> bool:
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
