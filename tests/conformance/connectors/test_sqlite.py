"""Specific to the SQLite queue: files that are wrong, and calls that are cancelled."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceward.connectors import AsyncSqliteConnector, DatabaseBusyError, SqliteConnector
from onceward.connectors.sqlite import statements
from onceward.errors import ConfigurationError
from onceward.testing.connectors import FakeClock
from onceward.transaction import Settlement, Transaction, Verdict


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


# The file.


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"this is a text, and a long one at that; " * 100)
    with pytest.raises(
        ConfigurationError, match=r"queue\.db cannot be opened as a queue: file is not a database"
    ):
        SqliteConnector(path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"directory .* does not exist: .*nowhere"):
        SqliteConnector(tmp_path / "nowhere" / "queue.db")


def test_a_directory_is_no_queue(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a directory"):
        SqliteConnector(tmp_path)


@pytest.mark.parametrize("name", ["", ":memory:"])
def test_a_queue_needs_a_file(name: str) -> None:
    with pytest.raises(ConfigurationError, match="MemoryConnector"):
        SqliteConnector(name)


def test_a_newer_schema_is_refused_and_left_alone(path: Path) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction()])
    execute(path, f"PRAGMA user_version = {statements.SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigurationError, match="newer onceward"):
        SqliteConnector(path)
    assert execute(path, "SELECT count(*) FROM messages") == [(1,)]


def test_the_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    execute(path, "CREATE TABLE customers (name TEXT)")
    with pytest.raises(ConfigurationError, match="another program"):
        SqliteConnector(path)
    assert execute(path, "SELECT name FROM sqlite_master") == [("customers",)]
    assert execute(path, "PRAGMA journal_mode") == [("delete",)]


def test_an_unknown_synchronous_setting_is_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="synchronous"):
        SqliteConnector(path, synchronous="SOMETIMES")  # type: ignore[arg-type]


def test_a_queue_survives_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SqliteConnector("queue.db") as queue:
        queue.dispatch_transactions([Transaction()])
        monkeypatch.chdir("/")
        queue._store.disconnect()  # type: ignore[attr-defined]
        assert queue.counts()["ready"] == 1


def test_counts_tell_ready_leased_delayed_and_dead_apart(path: Path) -> None:
    clock = FakeClock()
    with SqliteConnector(path, clock=clock, lease=60.0) as queue:
        queue.dispatch_transactions([Transaction() for _ in range(10)])
        fetched = queue.fetch_transactions(6)
        queue.settle_transactions([Settlement(fetched[0], Verdict.FAILED)])
        assert queue.counts() == {"ready": 4, "leased": 5, "delayed": 1, "dead": 0}
        clock.advance(61.0)
        assert queue.counts() == {"ready": 10, "leased": 0, "delayed": 0, "dead": 0}


def test_transactions_that_nobody_settles_do_not_pile_up_in_memory(path: Path) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction() for _ in range(10)])
        fetched = queue.fetch_transactions(10)
        assert len(queue._deliveries) == 10
        del fetched
        assert len(queue._deliveries) == 0


def test_a_fetch_gives_up_on_a_locked_file_after_a_second(path: Path) -> None:
    with SqliteConnector(path) as queue:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseBusyError, match="locked for 1 s"):
            queue.fetch_transactions(1)
        other.close()
        assert queue.fetch_transactions(1) == []


# Cancellation.


class Gate:
    """Holds a connector in the middle of a method: the SQL has run, but the caller does not know yet."""

    def __init__(self, connector: AsyncSqliteConnector, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        real: Callable[..., Any] = getattr(connector._wire, method)

        def gated(*args: Any) -> Any:
            result = real(*args)
            self.reached.set()
            self.open.wait()
            return result

        monkeypatch.setattr(connector._wire, method, gated)

    async def wait(self) -> None:
        await asyncio.to_thread(self.reached.wait)


def test_a_cancelled_fetch_gives_back_what_it_took(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncSqliteConnector(path, max_deliveries=2) as queue:
            await queue.dispatch_transactions_async([Transaction() for _ in range(3)])
            for _ in range(3):
                gate = Gate(queue, "fetch_transactions", monkeypatch)
                fetch = asyncio.create_task(queue.fetch_transactions_async(3))
                await gate.wait()
                fetch.cancel()
                await asyncio.sleep(0)
                fetch.cancel("once more, while it waits for the thread")
                gate.open.set()
                with pytest.raises(asyncio.CancelledError):
                    await fetch
                monkeypatch.undo()
                assert await queue.counts_async() == {"ready": 3, "leased": 0, "delayed": 0, "dead": 0}
            assert len(await queue.fetch_transactions_async(3)) == 3

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_its_turn_does_not_happen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncSqliteConnector(path) as queue:
            gate = Gate(queue, "counts", monkeypatch)
            busy = asyncio.create_task(queue.counts_async())
            await gate.wait()
            dispatch = asyncio.create_task(queue.dispatch_transactions_async([Transaction()]))
            await asyncio.sleep(0)
            dispatch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dispatch
            gate.open.set()
            await busy
            assert (await queue.counts_async())["ready"] == 0

    asyncio.run(main())


def test_a_call_that_is_cancelled_in_its_midst_has_ended_when_the_cancellation_is_felt(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncSqliteConnector(path) as queue:
            gate = Gate(queue, "dispatch_bodies", monkeypatch)
            dispatch = asyncio.create_task(queue.dispatch_transactions_async([Transaction()]))
            await gate.wait()
            dispatch.cancel()
            done, _ = await asyncio.wait([dispatch], timeout=0.05)
            assert done == set(), "it must not leave its thread running"
            gate.open.set()
            with pytest.raises(asyncio.CancelledError):
                await dispatch
            assert (await queue.counts_async())["ready"] == 1

    asyncio.run(main())


def test_closing_waits_for_calls_under_way_even_when_cancelled(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        queue = AsyncSqliteConnector(path)
        gate = Gate(queue, "dispatch_bodies", monkeypatch)
        dispatch = asyncio.create_task(queue.dispatch_transactions_async([Transaction()]))
        await gate.wait()
        closing = asyncio.create_task(queue.close_async())
        await asyncio.sleep(0)
        closing.cancel()
        gate.open.set()
        await dispatch
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert queue._wire._store._closed  # type: ignore[attr-defined]

    asyncio.run(main())


def execute(path: Path, statement: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.commit()
        connection.close()
