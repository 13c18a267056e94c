"""PostgreSQL in asyncio: the event loop watches a socket between statements, and no accident leaves it watched."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import psycopg
import pytest
from psycopg.errors import AdminShutdown, OperationalError
from sqlalchemy import make_url

from onceward.db.backends.postgresql_asyncio import LOOK_AGAIN, WatchedConnection
from onceward.db.engines import connect_arguments

Test = Callable[[WatchedConnection], Awaitable[None]]
variable: ContextVar[str] = ContextVar("variable", default="")


@pytest.fixture
def run(postgres_url: str) -> Callable[[Test], None]:
    url = make_url(postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)

    def run(test: Test) -> None:
        async def main() -> None:
            async with await WatchedConnection.connect(url, autocommit=True) as connection:
                await test(connection)

        asyncio.run(main())

    return run


def watched(number: int) -> bool:
    loop: Any = asyncio.get_running_loop()
    return number in loop._selector.get_map()


async def scalar(connection: psycopg.AsyncConnection[Any], query: str, *values: Any) -> Any:
    cursor = await connection.execute(query, values or None)
    row = await cursor.fetchone()
    assert row is not None
    return row[0]


async def until_it_runs(connection: WatchedConnection) -> None:
    """Until the server has begun with a statement: before that, a cancel would not meet it."""
    pid = connection.info.backend_pid
    query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND state = 'active'"
    async with await psycopg.AsyncConnection.connect(connection.info.dsn, autocommit=True) as other:
        while not await scalar(other, query, pid):
            await asyncio.sleep(0.01)


async def terminate(connection: WatchedConnection) -> None:
    """As if the server went away."""
    pid = connection.info.backend_pid
    async with await psycopg.AsyncConnection.connect(connection.info.dsn, autocommit=True) as other:
        await other.execute("SELECT pg_terminate_backend(%s)", [pid])
        while await scalar(other, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid):
            await asyncio.sleep(0.01)


def test_an_app_uses_it(postgres_url: str) -> None:
    url = make_url(postgres_url)
    assert connect_arguments(url, asynchronous=True)["async_creator_fn"] == WatchedConnection.connect
    assert "async_creator_fn" not in connect_arguments(url)
    assert "async_creator_fn" not in connect_arguments(
        url.set(drivername="postgresql+asyncpg"), asynchronous=True
    )


def test_the_socket_is_watched_between_statements_and_not_for_long(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        number = connection.fileno()
        for value in range(100):
            assert await scalar(connection, "SELECT %s::int", value) == value
            assert watched(number)
        await asyncio.sleep(2.5 * LOOK_AGAIN)
        assert not watched(number)
        assert await scalar(connection, "SELECT 1") == 1

    run(test)


def test_a_closed_connection_is_not_watched(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        number = connection.fileno()
        await scalar(connection, "SELECT 1")
        await connection.close()
        assert not watched(number)

    run(test)


def test_a_statement_takes_longer_than_a_look(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        assert await scalar(connection, "SELECT 7 FROM pg_sleep(%s)", 3.3 * LOOK_AGAIN) == 7

    run(test)


def test_what_nobody_asked_for_does_not_keep_the_event_loop_busy(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        await connection.execute("LISTEN here")
        async with await psycopg.AsyncConnection.connect(connection.info.dsn, autocommit=True) as other:
            await other.execute("NOTIFY here, 'a'")
            assert await scalar(connection, "SELECT 1") == 1
            await other.execute("NOTIFY here, 'b'")
            await asyncio.sleep(0.02)
            before = time.process_time()
            await asyncio.sleep(0.2)
            assert time.process_time() - before < 0.15
        assert await scalar(connection, "SELECT 2") == 2

    run(test)


def test_notifications_are_waited_for_as_before(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        await connection.execute("LISTEN here")
        async with await psycopg.AsyncConnection.connect(connection.info.dsn, autocommit=True) as other:
            await other.execute("NOTIFY here, 'a'")
        heard = [each.payload async for each in connection.notifies(timeout=5, stop_after=1)]
        assert heard == ["a"]
        assert await scalar(connection, "SELECT 1") == 1

    run(test)


def test_a_canceled_statement_is_canceled_on_the_server(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        for pause in (0.0, 2 * LOOK_AGAIN):
            task = asyncio.create_task(scalar(connection, "SELECT 1 FROM pg_sleep(60)"))
            await until_it_runs(connection)
            await asyncio.sleep(pause)
            task.cancel("enough")
            began = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began < 10
            assert await scalar(connection, "SELECT 2") == 2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await scalar(connection, "SELECT 1 FROM pg_sleep(60)")
        assert await scalar(connection, "SELECT 3") == 3

    run(test)


def test_an_answer_and_a_cancellation_at_once(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        for _ in range(20):
            task = asyncio.create_task(scalar(connection, "SELECT 1"))
            await asyncio.sleep(0)
            time.sleep(0.002)  # the answer is there
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await scalar(connection, "SELECT 2") == 2

    run(test)


@pytest.mark.parametrize("query", ["SELECT 1", "SELECT pg_terminate_backend(pg_backend_pid())"])
def test_a_server_that_leaves_leaves_no_socket_behind(run: Callable[[Test], None], query: str) -> None:
    """Another socket may get its number. The event loop would take it for the old one, and fail."""

    async def test(connection: WatchedConnection) -> None:
        number = connection.fileno()
        await scalar(connection, "SELECT 1")
        if "terminate" not in query:
            await terminate(connection)
        with pytest.raises((OperationalError, AdminShutdown)):
            await scalar(connection, query)
        assert not watched(number)
        ours, theirs = socket.socketpair()
        try:
            arrived = asyncio.Event()
            asyncio.get_running_loop().add_reader(ours, arrived.set)
            theirs.send(b"x")
            await asyncio.wait_for(arrived.wait(), 10)
        finally:
            asyncio.get_running_loop().remove_reader(ours)
            ours.close()
            theirs.close()

    run(test)


def test_a_connection_that_is_closed_by_another_task_ends_the_wait(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        number = connection.fileno()
        task = asyncio.create_task(scalar(connection, "SELECT 1 FROM pg_sleep(60)"))
        await until_it_runs(connection)
        await connection.close()
        began = time.monotonic()
        with pytest.raises(OperationalError):
            await asyncio.wait_for(task, 30)
        assert time.monotonic() - began < 10
        assert not watched(number)

    run(test)


def test_more_than_fits_into_the_socket(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        for _ in range(3):
            assert await scalar(connection, "SELECT length(%b::bytea)", bytes(20_000_000)) == 20_000_000
            assert len(await scalar(connection, "SELECT repeat('x', 20000000)")) == 20_000_000

    run(test)


def test_a_task_keeps_its_context(run: Callable[[Test], None]) -> None:
    async def test(connection: WatchedConnection) -> None:
        async def work(name: str, on: psycopg.AsyncConnection[Any]) -> None:
            variable.set(name)
            for value in range(50):
                assert await scalar(on, "SELECT %s::int", value) == value
                assert variable.get() == name
                task = asyncio.current_task()
                assert task is not None
                assert task.get_name() == name

        async with await WatchedConnection.connect(connection.info.dsn, autocommit=True) as other:
            await asyncio.gather(
                asyncio.create_task(work("a", connection), name="a"),
                asyncio.create_task(work("b", other), name="b"),
                asyncio.create_task(work("c", other), name="c"),
            )
        assert variable.get() == ""

    run(test)


def test_one_event_loop_after_another(postgres_url: str) -> None:
    url = make_url(postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)

    async def connect() -> WatchedConnection:
        connection = await WatchedConnection.connect(url, autocommit=True)
        await scalar(connection, "SELECT 1")
        return connection

    async def use(connection: WatchedConnection) -> None:
        assert await scalar(connection, "SELECT 2") == 2
        await connection.close()

    asyncio.run(use(asyncio.run(connect())))
