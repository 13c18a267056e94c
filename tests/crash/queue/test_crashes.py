"""Processes die and Redis restarts at the worst moment: every message takes effect once, and none is lost."""

from __future__ import annotations

import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine

from onceward.queue import QueueConfig, QueueConsumer, QueueError, QueueMessage, RedisStreamsQueue
from onceward.testing import servers
from tests.crash.queue.processes import FATAL, INSERT
from tests.support.processes import Start, processes
from tests.support.queue.world import QueueWorld
from tests.support.wait import until

SCRIPT = Path(__file__).with_name("processes.py")
COUNT = 8


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "effects.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY)")
    return path


@pytest.fixture(params=["threads", "asyncio"])
def start(request: pytest.FixtureRequest, database: Path) -> Iterator[Start]:
    """Starts a consumer process."""
    fixed = [sys.executable, str(SCRIPT), request.param]
    with processes() as begin:
        yield lambda place, url, stream: begin([*fixed, place, url, stream, str(database)])


def effects(database: Path) -> list[int]:
    with closing(sqlite3.connect(database)) as connection:
        return [id_ for (id_,) in connection.execute("SELECT id FROM effects ORDER BY id")]


@pytest.mark.usual("in-handler", "after-commit")
@pytest.mark.req("QC-15")
@pytest.mark.parametrize("place", ["after-fetch", "in-handler", "after-commit", "after-ack"])
def test_a_consumer_killed_anywhere_loses_nothing_and_another_finishes(
    redis_url: str, database: Path, start: Start, place: str
) -> None:
    stream = f"crash-{place}-{database.parent.name}"
    with redis.Redis.from_url(redis_url) as client:
        queue = RedisStreamsQueue(client, QueueConfig(stream, "group", "test", block_ms=50))
        for number in range(1, COUNT + 1):
            queue.enqueue(number)
        assert start(place, redis_url, stream).wait(60) == -signal.SIGKILL
        committed = {"after-fetch": 0, "in-handler": FATAL - 1}.get(place, FATAL)
        assert effects(database) == list(range(1, committed + 1))
        pending = {"after-fetch": FATAL, "after-ack": 0}.get(place, 1)
        assert queue.backlog_stats().pending == pending

        engine = create_engine(f"sqlite:///{database}")
        recovery = QueueConsumer(client, QueueConfig(stream, "group", "recovery", claim_idle_ms=0))

        def handle(message: QueueMessage, session: Any) -> None:
            assert message.deliveries == 2
            session.execute(INSERT, {"id": message.payload})
            if recovery.backlog_stats().pending == 1:
                recovery.stop()

        if pending:
            recovery.run_claim_stale(handler=handle, engine=engine)
        engine.dispose()
        process = start("nowhere", redis_url, stream)
        until(lambda: effects(database) == list(range(1, COUNT + 1)))
        until(lambda: queue.backlog_stats().pending == 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert queue.backlog_stats().pending == 0
        assert effects(database) == list(range(1, COUNT + 1))


@pytest.mark.req("QC-06")
def test_sigterm_ends_an_idle_process_in_good_order(redis_url: str, database: Path, start: Start) -> None:
    process = start("nowhere", redis_url, f"term-{database.parent.name}")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.req("QC-05", "QC-15")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_redis_restarted_under_load_loses_nothing(database: Path, mode: str) -> None:
    """Producer and consumer get QueueErrors and start again; numbers are their own keys."""
    total = 1500
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    same: dict[str, Any] = {"stream_key": "restarted", "block_ms": 200, "claim_idle_ms": 0}
    errors = {"producer": 0, "consumer": 0}
    sent = 0
    finished = threading.Event()
    consumers: list[Any] = []
    with servers.redis_server(durable=True) as server:

        def produce() -> None:
            nonlocal sent
            with QueueWorld(mode, server.url, database.parent) as world:
                queue = world.queue(**same)
                while sent < total:
                    try:
                        queue.enqueue(sent)
                        sent += 1
                    except QueueError:
                        errors["producer"] += 1
                        time.sleep(0.01)

        def consume() -> None:
            with QueueWorld(mode, server.url, database.parent) as world:
                while not finished.is_set():
                    consumer = world.consumer(**same)
                    consumers.append(consumer.thing)
                    try:
                        consumer.run(handler=world.handler(INSERT), engine=world.engine)
                    except QueueError:
                        errors["consumer"] += 1
                        time.sleep(0.01)

        threads = [threading.Thread(target=produce), threading.Thread(target=consume)]
        for thread in threads:
            thread.start()
        for part in (1, 2, 3):
            until(lambda part=part: sent >= total * part // 4)
            server.kill()
            time.sleep(0.05)
            server.start()
        threads[0].join(60)
        assert sent == total
        with QueueWorld(mode, server.url, database.parent) as world:

            def delivered() -> bool:
                [group] = world.admin.xinfo_groups("restarted")
                [last] = world.admin.xrevrange("restarted", count=1)
                return bool(group["last-delivered-id"] in (last[0], last[0].decode()))

            until(delivered)
            finished.set()
            until(lambda: [consumer.stop() for consumer in consumers] and not threads[1].is_alive())
            threads[1].join(60)
            recovery = world.consumer(**same)

            def stop_after_the_last(_: QueueMessage) -> None:
                if world.admin.xpending("restarted", "group")["pending"] == 1:
                    recovery.stop()

            if world.admin.xpending("restarted", "group")["pending"]:
                handler = world.handler(INSERT, after=stop_after_the_last)
                recovery.run_claim_stale(handler=handler, engine=world.engine)
            assert world.queue(**same).backlog_stats().pending == 0
        assert effects(database) == list(range(total))
        assert errors["consumer"] >= 1
