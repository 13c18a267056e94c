"""The connection that listens: it hears, and no accident leaves it open."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event

from onceward.db.listen import ListenLine
from tests.support.schema import new_schema
from tests.support.wait import until

pytestmark = pytest.mark.req("WK-04")

LONG = 60.0


@pytest.fixture
def engine(postgres_url: str) -> Iterator[Engine]:
    with new_schema(postgres_url) as schema:
        made = create_engine(schema.url, connect_args=schema.connect_args)
        yield made
        made.dispose()


@pytest.fixture
def channel(request: pytest.FixtureRequest) -> str:
    return f"test_{abs(hash(request.node.nodeid))}"


def notify(engine: Engine, channel: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(f"NOTIFY {channel}")


def listeners(engine: Engine, channel: str) -> int:
    query = f"SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN {channel}'"
    with engine.connect() as connection:
        return int(connection.exec_driver_sql(query).scalar_one())


def quiet(line: ListenLine) -> None:
    until(lambda: not line.begin() and not line.wait(0.1))
    assert line.hears


def without_leaks(use: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        use()
        gc.collect()
    assert [str(each.message) for each in seen] == []


def test_a_notification_ends_a_wait_in_a_thread_and_in_a_task(engine: Engine, channel: str) -> None:
    line = ListenLine(engine, channel, "test")
    quiet(line)
    timer = threading.Timer(0.1, notify, (engine, channel))
    timer.start()
    assert line.wait(LONG)
    timer.join()
    quiet(line)
    notify(engine, channel)  # before the wait
    assert asyncio.run(line.wait_async(LONG))
    line.close()
    until(lambda: listeners(engine, channel) == 0)


def test_closing_it_ends_a_wait_of_another_thread(engine: Engine, channel: str) -> None:
    line = ListenLine(engine, channel, "test")
    quiet(line)
    waiting = threading.Thread(target=line.wait, args=(LONG,))
    waiting.start()
    time.sleep(0.1)
    line.close()
    waiting.join(LONG / 2)
    assert not waiting.is_alive()


def test_a_second_waiter_pauses_and_looks(engine: Engine, channel: str) -> None:
    line = ListenLine(engine, channel, "test")
    quiet(line)
    waiting = threading.Thread(target=line.wait, args=(LONG,))
    waiting.start()
    time.sleep(0.1)
    assert line.wait(LONG)  # it does not know
    line.close()
    waiting.join(LONG / 2)


def test_one_that_nobody_closes_is_closed_when_it_is_dropped(engine: Engine, channel: str) -> None:
    def use() -> None:
        quiet(ListenLine(engine, channel, "test"))

    without_leaks(use)
    until(lambda: listeners(engine, channel) == 0)


@pytest.mark.parametrize("fails", ["rollback", "execute"])
def test_one_that_cannot_be_set_up_is_closed(
    engine: Engine,
    channel: str,
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise psycopg.OperationalError("the server is tired")

    engine.connect().close()  # in the pool
    opened: list[Any] = []
    real = Engine.raw_connection

    def observed(self: Engine) -> Any:
        lent = real(self)
        opened.append(lent.driver_connection)
        monkeypatch.setattr(type(opened[-1]), fails, refuse)
        return lent

    monkeypatch.setattr(Engine, "raw_connection", observed)
    line = ListenLine(engine, channel, "queue orders")
    assert not line.begin()
    monkeypatch.undo()
    assert [each.closed for each in opened] == [True]
    assert not line.hears
    assert line.wait(LONG)  # a short pause
    assert caplog.text.count("queue orders: LISTEN does not work here") == 1
    assert "the server is tired" in caplog.text


def test_one_that_found_no_room_listens_once_there_is(
    engine: Engine, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise psycopg.OperationalError("sorry, too many clients already")

    line = ListenLine(engine, channel, "test")
    monkeypatch.setattr(Engine, "raw_connection", refuse)
    assert not line.begin()
    monkeypatch.undo()

    def hears() -> bool:
        line.begin()
        line.wait(0.1)
        return line.hears

    until(hears)
    line.close()


def test_a_canceled_wait_leaves_nothing_behind(engine: Engine, channel: str) -> None:
    async def cancel() -> None:
        line = ListenLine(engine, channel, "test")
        quiet(line)
        for _ in range(3):
            waiting = asyncio.ensure_future(line.wait_async(LONG))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        notify(engine, channel)
        assert await line.wait_async(LONG)

    without_leaks(lambda: asyncio.run(cancel()))
    until(lambda: listeners(engine, channel) == 0)


def test_a_child_process_leaves_the_connection_to_its_parent(engine: Engine, channel: str) -> None:
    line = ListenLine(engine, channel, "test")
    quiet(line)
    child = os.fork()
    if child == 0:
        try:
            engine.dispose(close=False)
            line.begin()
            assert line.begin() is False
            line.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    notify(engine, channel)
    assert line.wait(LONG)
    assert line.hears
    quiet(line)
    line.close()


def test_an_engine_that_is_disposed_while_a_line_begins_keeps_no_connection(
    engine: Engine, channel: str
) -> None:
    """Nobody would close one that goes to the pool of an engine that was disposed."""
    opened: list[Any] = []

    def dispose(driver: Any, _: Any) -> None:
        opened.append(driver)
        engine.dispose()

    event.listen(engine, "connect", dispose)
    line = ListenLine(engine, channel, "test")
    line.begin()
    line.close()
    event.remove(engine, "connect", dispose)
    assert [each.closed for each in opened] == [True, True]
