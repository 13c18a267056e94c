"""What wakes a relay: a commit of another connection or process, not its own looks alone."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from onceward.outbox import wake
from onceward.outbox.wake import NotifiedBell
from tests.support.outbox import OutboxWorld, drain, outbox
from tests.support.wait import until

__all__ = ["outbox"]


def bell_of(relay: Any) -> Any:
    return relay._bell


@pytest.mark.req("OB-14")
def test_a_commit_ends_the_wait_of_an_idle_relay(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    drain(relay)
    bell = bell_of(relay)
    if isinstance(bell, NotifiedBell):
        until(lambda: bell.listening)
    waits = []
    for number in range(5):
        bell.clear()
        outbox.send(number)
        began = time.monotonic()
        assert bell.wait(30.0)
        waits.append(time.monotonic() - began)
    assert min(waits) < 1.0  # by itself it would look after a second at the earliest


@pytest.mark.req("OB-14")
def test_without_notifications_the_relay_polls_and_says_so_once(
    outbox: OutboxWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if outbox.engine.dialect.name == "sqlite":
        return  # it has no server to listen to

    def refuse(engine: Any) -> Any:
        raise RuntimeError("LISTEN is not supported here")

    monkeypatch.setattr(wake, "connect", refuse)
    monkeypatch.setattr(wake, "AGAIN", wake.Backoff(0.01, cap=0.02))
    relay = outbox.relay()
    with caplog.at_level(logging.WARNING, "onceward.outbox"):
        for number in range(3):
            outbox.send(number)
            drain(relay)
        until(lambda: caplog.records)
        time.sleep(0.5)
    assert outbox.sink.payloads == [0, 1, 2]
    lines = [each.getMessage() for each in caplog.records if "cannot listen" in each.getMessage()]
    assert lines == [
        "the relay cannot listen to PostgreSQL and looks for new messages by itself: LISTEN is not supported here"
    ]


@pytest.mark.req("OB-14")
def test_notifications_that_never_arrive_are_noticed(
    outbox: OutboxWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a pooler in transaction mode, where LISTEN succeeds and nothing comes."""
    if outbox.engine.dialect.name == "sqlite":
        return
    real = wake.connect

    class Deaf:
        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def execute(self, _: str) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    monkeypatch.setattr(wake, "connect", lambda engine: Deaf(real(engine)))
    monkeypatch.setattr(wake, "ECHO", 0.1)
    relay = outbox.relay()
    with caplog.at_level(logging.WARNING, "onceward.outbox"):
        outbox.send("one")
        drain(relay)
        until(lambda: "no notification arrives" in caplog.text)
    assert outbox.sink.payloads == ["one"]


@pytest.mark.req("OB-14")
def test_a_broken_connection_is_listened_on_again(
    outbox: OutboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    if outbox.engine.dialect.name == "sqlite":
        return
    monkeypatch.setattr(wake, "AGAIN", wake.Backoff(0.05, cap=0.1))
    opened: list[Any] = []
    real = wake.connect

    def connect(engine: Any) -> Any:
        opened.append(real(engine))
        return opened[-1]

    monkeypatch.setattr(wake, "connect", connect)
    relay = outbox.relay()
    drain(relay)
    bell = bell_of(relay)
    until(lambda: bell.listening)
    with outbox.engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT pg_terminate_backend({opened[0].info.backend_pid})")
    until(lambda: len(opened) >= 2 and bell.listening)
    outbox.send("one")
    drain(relay)
    assert outbox.sink.payloads == ["one"]
