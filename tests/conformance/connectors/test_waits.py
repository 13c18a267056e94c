"""Waits that another process ends, with and without inotify."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward._process import watch
from onceward.connectors import AsyncSqliteConnector, SqliteConnector
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.testing.connectors import ConnectorDriver
from tests.support.wait import until

SEND = """
import sys, time
from onceward import Transaction
from onceward.connectors.urls import Address

time.sleep(0.3)
Address(sys.argv[1], sink=True).open(asynchronous=False).dispatch_transactions([Transaction(payload="hello")])
"""
LONG = 60.0


def get(queue: ConnectorDriver, url: str) -> Any:
    """What another process sends while the queue waits."""
    assert queue.fetch() == []
    sender = subprocess.Popen([sys.executable, "-c", SEND, url])
    began = time.monotonic()
    while not (fetched := queue.fetch()):
        assert queue.call("await_transactions", LONG)
    assert time.monotonic() - began < LONG / 2
    assert sender.wait(LONG) == 0
    return fetched[0].payload


@pytest.mark.req("WK-02")
@pytest.mark.parametrize("has_inotify", [True, False])
@pytest.mark.parametrize("kind", [SqliteConnector, AsyncSqliteConnector])
def test_a_message_of_another_process_ends_the_wait_of_a_file(
    kind: Any, has_inotify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_inotify:
        monkeypatch.setattr(watch, "_open_inotify", lambda: None)
    path = tmp_path / "queue.db"
    with ConnectorDriver(kind(path)) as queue:
        assert get(queue, f"sqlite:///{path}") == "hello"


@pytest.mark.req("WK-02")
@pytest.mark.parametrize("kind", [RedisStreamsConnector, AsyncRedisStreamsConnector])
def test_a_message_of_another_process_ends_the_wait_of_a_stream(kind: Any, redis_url: str) -> None:
    stream = uuid4().hex
    with ConnectorDriver(kind(redis_url, stream, group="g")) as queue:
        assert get(queue, f"{redis_url}/{stream}?group=g") == "hello"


def test_a_watch_misses_nothing_between_two_waits_and_sees_writes_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    seen = watch.FileWatch(file)
    assert seen.wait(0.0)
    file.write_text("two")
    assert seen.wait(LONG)
    assert not seen.wait(0.01)
    seen.close()


def test_a_watch_of_a_file_that_is_not_there_yet_sees_it_come(tmp_path: Path) -> None:
    file = tmp_path / "file"
    seen = watch.FileWatch(file)
    seen.wait(0.0)
    assert not seen.wait(0.01)
    file.write_text("one")
    assert seen.wait(LONG)
    seen.close()


def test_a_watch_sees_writes_to_a_file_that_took_the_place_of_another(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    seen = watch.FileWatch(file)
    seen.wait(0.0)
    for number in range(3):  # file systems give the number of a file that is gone to the next one
        file.unlink()
        file.write_text(f"another {number}")
        assert seen.wait(LONG)
        until(lambda: not seen.wait(0.01))
        file.write_text("two")
        assert seen.wait(0.5)
    seen.close()
