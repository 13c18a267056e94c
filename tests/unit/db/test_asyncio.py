"""Specific to asyncio: cancellations, and several tasks on one session."""

# ruff: noqa: PT012  leaving the block is what is tested, so it is inside `raises`

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from onceward.db import AsyncDbSession, SessionError
from onceward.db.transaction_asyncio import AsyncSessionPort

INSERT = "INSERT INTO db_tasks (id) VALUES (:id)"
Test = Callable[[AsyncEngine], Awaitable[None]]
Run = Callable[[Test], None]


@pytest.fixture(params=["sqlite", "postgresql"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run a coroutine function with an engine of one connection and an empty table."""
    if request.param == "sqlite":
        url = f"sqlite+aiosqlite:///{tmp_path}/test.db"
    else:
        url = request.getfixturevalue("postgres_url")

    async def main(test: Test) -> None:
        async with _engine(url) as engine:
            await test(engine)

    return lambda test: asyncio.run(main(test))


@asynccontextmanager
async def _engine(url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=60)
    async with AsyncDbSession(engine) as session:
        await session.execute("CREATE TABLE db_tasks (id INTEGER PRIMARY KEY)")
    try:
        yield engine
    finally:
        async with AsyncDbSession(engine) as session:
            await session.execute("DROP TABLE db_tasks")
        await engine.dispose()


async def count(engine: AsyncEngine) -> Any:
    async with AsyncDbSession(engine) as session:
        return await session.execute_scalar("SELECT count(*) FROM db_tasks")


@pytest.mark.req("QC-14")
def test_a_cancelled_task_rolls_back_and_gives_its_connection_back(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        inside = asyncio.Event()

        async def work() -> None:
            async with AsyncDbSession(engine) as session:
                await session.execute(INSERT, {"id": 1})
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await count(engine) == 0

    run(test)


SLOW = {
    "sqlite": """
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000000)
        SELECT i FROM n ORDER BY i DESC LIMIT 2 -- sorted: not even the first row is there before the last
    """,
    "postgresql": "SELECT pg_sleep(1)",
}


def test_a_statement_that_was_cut_short_leaves_a_session_that_can_only_roll_back(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(SessionError, match="nothing was committed"):
            async with AsyncDbSession(engine) as session:
                await session.execute(INSERT, {"id": 1})
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await session.execute_scalar(SLOW[engine.dialect.name])
                with pytest.raises(SessionError, match="can only be rolled back"):
                    await session.execute(INSERT, {"id": 2})
        assert await count(engine) == 0

    run(test)


def slow_end(engine: AsyncEngine, end: str, task: Callable[[], asyncio.Task[None]]) -> None:
    """Cancel the task repeatedly while its session ends."""

    def interrupt(connection: Any) -> None:
        for _ in range(3):
            task().cancel()
            connection.connection.cursor().execute(
                "SELECT 1"
            )  # a round trip to the database, during which cancels arrive

    event.listen(engine.sync_engine, end, interrupt, once=True)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_cancellation_during_the_end_waits_for_the_end(run: Run, end: str) -> None:
    async def test(engine: AsyncEngine) -> None:
        sessions: list[AsyncDbSession] = []

        async def work() -> None:
            async with AsyncDbSession(engine) as session:
                sessions.append(session)
                await session.execute(INSERT, {"id": 1})
                if end == "rollback":
                    raise ZeroDivisionError

        task = asyncio.create_task(work())
        slow_end(engine, end, lambda: task)
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert sessions[0].committed is (end == "commit")
        assert await count(engine) == (1 if end == "commit" else 0)
        assert isinstance(caught.value.__context__, ZeroDivisionError) is (end == "rollback")

    run(test)


def test_a_commit_that_fails_during_a_cancellation_is_its_cause(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        async def work() -> None:
            async with AsyncDbSession(engine) as session:
                await session.execute(INSERT, {"id": 1})

        task = asyncio.create_task(work())
        slow_end(engine, "commit", lambda: task)
        event.listen(engine.sync_engine, "commit", _fail, once=True)
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, OSError)
        assert await count(engine) == 0

    run(test)


def _fail(_: Any) -> None:
    raise OSError("no")


@pytest.mark.req("QC-14")
def test_a_session_whose_event_loop_closes_gives_its_connection_back(run: Run) -> None:
    """Closing it cancels every task at once: also the one that ends the session, before it has begun."""

    async def test(engine: AsyncEngine) -> None:
        sessions: list[AsyncDbSession] = []

        async def work() -> None:
            async with AsyncDbSession(engine) as session:
                sessions.append(session)
                await session.execute(INSERT, {"id": 1})

        before = asyncio.all_tasks()
        working = asyncio.create_task(work())
        while not (ending := asyncio.all_tasks() - before - {working}):
            await asyncio.sleep(0)
        for task in ending | {working}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert sessions[0].committed
        assert await count(engine) == 1

    run(test)


def test_operations_of_several_tasks_run_one_after_another(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with AsyncDbSession(engine) as session:
            ids = [number % 10 for number in range(40)]
            inserted = await asyncio.gather(*(session.insert_idempotent("db_tasks", {"id": n}) for n in ids))
        assert inserted == [True] * 10 + [False] * 30
        assert await count(engine) == 10

    run(test)


def test_a_task_that_outlives_the_block_is_waited_for_once_and_then_refused(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with AsyncDbSession(engine) as session:
            tasks = [asyncio.create_task(session.execute(INSERT, {"id": number})) for number in range(2)]
            await asyncio.sleep(0)  # both have begun, and the second waits for its turn
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert outcomes == [1, 1]
        late = asyncio.create_task(session.execute(INSERT, {"id": 3}))
        with pytest.raises(SessionError, match="ended with its block"):
            await late
        assert await count(engine) == 2

    run(test)


def test_a_session_that_waits_for_a_connection_can_be_cancelled(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with AsyncDbSession(engine) as session:
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await AsyncDbSession(engine).__aenter__()
            assert time.monotonic() - began < 30
            await session.execute(INSERT, {"id": 1})
        assert await count(engine) == 1

    run(test)


@pytest.mark.req("QC-14")
def test_a_session_that_is_closed_without_its_event_loop_leaves_no_coroutine_behind(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/test.db")
    leaving = AsyncSessionPort(engine, "AsyncDbSession").__aexit__(None, None, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="no running event loop"):
            leaving.send(None)
        del leaving
        gc.collect()

    assert not [each for each in caught if "never awaited" in str(each.message)]


@pytest.mark.parametrize("run", ["postgresql"], indirect=True)
def test_a_text_goes_to_the_driver_without_a_greenlet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with AsyncDbSession(engine) as session:
            with monkeypatch.context() as patch:
                patch.setattr(AsyncConnection, "run_sync", None)
                assert await session.execute(INSERT, {"id": 1}) == 1
        assert await count(engine) == 1

    run(test)


@pytest.mark.parametrize("run", ["postgresql"], indirect=True)
def test_a_connection_that_the_server_has_cut_is_discarded(run: Run) -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(DBAPIError) as raised:
            async with AsyncDbSession(engine) as session:
                process = await session.execute_scalar("SELECT pg_backend_pid()")
                other = create_async_engine(engine.url)
                async with AsyncDbSession(other) as killer:
                    await killer.execute(f"SELECT pg_terminate_backend({process}, 5000)")
                await other.dispose()
                await session.execute(INSERT, {"id": 1})
        assert raised.value.connection_invalidated
        assert await count(engine) == 0

    run(test)
