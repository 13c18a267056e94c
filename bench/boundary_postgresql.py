"""The boundary store on PostgreSQL, against plain psycopg on the same table; both durable.

The plain client checks nothing, does not order commits, and takes its offsets from a sequence.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import psycopg

from bench.boundary import APPENDERS, BATCH, Message, at_least, messages
from bench.measure import Line, compare
from onceward.boundary.boundary import Boundary
from onceward.boundary.canonical import content_digest
from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore
from onceward.boundary.wire import record
from onceward.testing.servers import postgres_server

COUNT = 6_000
PAGE = 1_000
PAGES = 30
PLAIN_TABLE = """
    CREATE TABLE plain (LIKE onceward_boundary_facts INCLUDING ALL);
    CREATE SEQUENCE plain_offsets;
    ALTER TABLE plain ALTER "offset" SET DEFAULT nextval('plain_offsets')
"""
INSERT = "INSERT INTO plain (message_id, digest, record, stream, appended_at) VALUES (%s, %s, %s, 'operational', 1)"
READ = 'SELECT "offset", record, appended_at FROM plain WHERE "offset" > %s ORDER BY "offset" LIMIT %s'


def lines() -> Iterator[Line]:
    with postgres_server() as server, asyncio.Runner() as runner:
        side_by_side = SideBySide()
        runner.run(side_by_side.open(server.url))

        def run(which: str) -> Any:
            return lambda: runner.run(getattr(side_by_side, which)())

        single, _ = compare(COUNT, run("plain_append"), lambda: None, side_by_side.prepare)
        batched, ours = compare(COUNT, run("plain_batches"), run("append"), side_by_side.prepare)
        yield at_least("PostgreSQL, append, 32 at once; bare: 32 plain", single, ours, 0.5)
        yield at_least("PostgreSQL, append, 32 at once; bare: 100 a commit", batched, ours, 0.5)
        plain, ours = compare(PAGES, run("plain_read"), run("fetch"))
        yield at_least("PostgreSQL, fetch 1000; bare: a plain read", plain, ours, 0.5)
        runner.run(side_by_side.close())


class SideBySide:
    """Both clients, connected before the measurement."""

    async def open(self, url: str) -> None:
        self._resources = AsyncExitStack()
        self._numbers = itertools.count(step=COUNT)
        store = await PostgreSqlBoundaryStore.open(url)
        self._resources.push_async_callback(store.close)
        self._boundary = Boundary(store)
        self._connections = [
            await self._resources.enter_async_context(
                await psycopg.AsyncConnection.connect(url, autocommit=True)
            )
            for _ in range(APPENDERS)
        ]
        await self._connections[0].execute(PLAIN_TABLE)

    async def close(self) -> None:
        await self._resources.aclose()

    def prepare(self) -> None:
        self._given = messages(COUNT, start=next(self._numbers))

    async def append(self) -> None:
        todo = iter(self._given)

        async def appender() -> None:
            for message in todo:
                await self._boundary.append(*message)

        await asyncio.gather(*(appender() for _ in range(APPENDERS)))

    async def plain_append(self) -> None:
        """One connection per appender, one durable call per fact."""
        todo = iter(self._given)

        async def appender(connection: psycopg.AsyncConnection[Any]) -> None:
            for message in todo:
                await connection.execute(INSERT, _row(message))

        await asyncio.gather(*(appender(connection) for connection in self._connections))

    async def plain_batches(self) -> None:
        """One connection, a hundred facts per commit."""
        connection = self._connections[0]
        for at in range(0, COUNT, BATCH):
            async with connection.transaction():
                rows = [_row(message) for message in self._given[at : at + BATCH]]
                await connection.cursor().executemany(INSERT, rows)

    async def fetch(self) -> None:
        for _ in range(PAGES):
            records, _ = await self._boundary.fetch("reader", PAGE)
            assert len(records) == PAGE

    async def plain_read(self) -> None:
        for _ in range(PAGES):
            read = await self._connections[0].execute(READ, (0, PAGE), binary=True)
            assert len(await read.fetchall()) == PAGE


def _row(message: Message) -> tuple[str, bytes, bytes]:
    return message[0].message_id, content_digest(*message), record(*message)
