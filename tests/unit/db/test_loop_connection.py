"""SQLite in asyncio: which statements run in the thread of the event loop, and what becomes of one that takes long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from onceward.db import AsyncDbSession
from onceward.db.backends import backend_of, sqlite_asyncio
from onceward.db.engines import connect_arguments
from onceward.storage.database import AsyncStoragePorts

COUNT = "SELECT count(*) FROM counted WHERE n <= :n"
ADD = (
    "INSERT INTO counted WITH RECURSIVE more (n) AS (SELECT :a UNION ALL SELECT n + 1 FROM more WHERE n < :b) "
    "SELECT n FROM more"
)
LONG = 300_000


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[AsyncEngine]:
    url = make_url(f"sqlite+aiosqlite:///{path / 'test.db'}")
    engine = create_async_engine(url, connect_args=connect_arguments(url))

    @event.listens_for(engine.sync_engine, "connect")
    def _(connection: Any, _: Any) -> None:
        connection.create_function("here", 0, threading.get_ident)

    async with AsyncDbSession(engine) as session:
        await session.execute("CREATE TABLE counted (n INTEGER)")
    try:
        yield engine
    finally:
        await engine.dispose()


def run(path: Path, test: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened(path) as engine:
            await test(engine)

    asyncio.run(main())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short limit, so no statement of a test needs to take long."""
    monkeypatch.setattr(sqlite_asyncio, "TOO_LONG", 0.001)


def repeated(engine: AsyncEngine) -> AsyncDbSession:
    session = AsyncDbSession(engine)
    session.port.transaction.repeated = True
    return session


@pytest.mark.req("GC-12")
def test_a_statement_known_to_be_short_runs_in_the_thread_of_the_event_loop(tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with repeated(engine) as session:
            first = await session.execute_scalar("SELECT here()")
            assert first != threading.get_ident()
            assert await session.execute_scalar("SELECT here()") == threading.get_ident()
        async with AsyncDbSession(engine) as session:  # nobody would make this one again
            assert await session.execute_scalar("SELECT here()") == first

    run(tmp_path, test)


@pytest.mark.req("GC-12")
@pytest.mark.usefixtures("impatient")
def test_a_query_that_turns_out_long_goes_on_in_the_thread(tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with repeated(engine) as session:
            for _ in range(2):
                assert await session.execute_scalar(COUNT, {"n": 1}) == 0
            await session.execute(ADD, {"a": 1, "b": LONG})
            assert await session.execute_scalar(COUNT, {"n": LONG}) == LONG
            driver: Any = (await session.port._connection.get_raw_connection()).driver_connection
            assert driver._paces[COUNT.replace(":n", "?")] > sqlite_asyncio.SHORT

    run(tmp_path, test)


@pytest.mark.req("GC-12")
@pytest.mark.usefixtures("impatient")
def test_a_change_that_turns_out_long_is_undone_and_its_transaction_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine) -> None:
        async def add_many() -> None:
            async with repeated(engine) as session:
                for n in range(2):
                    await session.execute(ADD, {"a": n, "b": n})
                await session.execute(ADD, {"a": 1, "b": LONG})

        with monkeypatch.context() as patch:
            patch.setattr(sqlite_asyncio, "thread_time", lambda: 0.0)  # so it is known to be short
            with pytest.raises(OperationalError, match="too long for the event loop") as raised:
                await add_many()
        assert backend_of(engine.dialect).is_serialization_failure(raised.value)
        async with AsyncDbSession(engine) as session:
            assert await session.execute_scalar("SELECT count(*) FROM counted") == 0

        times: list[int] = []

        def add(transaction: Any) -> None:
            times.append(1)
            for n, last in ((1, 1), (2, 2), (3, LONG)):
                transaction.connection.exec_driver_sql(ADD.replace(":a", "?").replace(":b", "?"), (n, last))

        await AsyncStoragePorts(engine).transact(add)
        assert (
            1 <= len(times) <= 2
        )  # it is known by now that the statement may be long, if the connection is the same
        async with AsyncDbSession(engine) as session:
            assert await session.execute_scalar("SELECT count(*) FROM counted") == LONG

    run(tmp_path, test)


@pytest.mark.req("GC-12")
def test_the_event_loop_gets_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_asyncio, "TURN", 0.0)

    async def test(engine: AsyncEngine) -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with repeated(engine) as session:
            await session.execute_scalar("SELECT here()")
            counting = asyncio.create_task(count())
            for _ in range(20):
                await session.execute_scalar("SELECT here()")
            counting.cancel()
        assert turns >= 20

    run(tmp_path, test)


def test_statements_that_somebody_listens_to_go_through_sqlalchemy(tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        heard: list[str] = []
        event.listen(engine.sync_engine, "before_cursor_execute", lambda *given: heard.append(given[2]))
        async with repeated(engine) as session:
            for n in range(3):
                await session.execute("INSERT INTO counted VALUES (:n)", {"n": n})
        assert heard == ["INSERT INTO counted VALUES (?)"] * 3

    run(tmp_path, test)
