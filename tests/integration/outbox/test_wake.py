"""What wakes a relay: a commit of another connection or process, not its own looks alone."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, make_url

from onceward.db import listen
from onceward.outbox import relay as relay_module
from onceward.outbox.relay import Relay
from tests.support.deaf_pooler import deaf_pooler
from tests.support.outbox import OutboxWorld, drain, outbox
from tests.support.wait import until

__all__ = ["outbox"]

LONG = 60.0


def quiet(relay: Relay) -> None:
    """Turn until a wait ends without news."""
    until(lambda: drain(relay) or not relay.await_transactions(0.2))


@pytest.fixture(autouse=True)
def looks_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, a relay would look after a second at the earliest."""
    monkeypatch.setattr(relay_module, "LONGEST_WAIT", LONG)
    monkeypatch.setattr(relay_module, "LONGEST_DEAF_WAIT", LONG)


@pytest.mark.req("OB-14", "WK-03")
def test_a_commit_ends_the_wait_of_an_idle_relay(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    for number in range(5):
        quiet(relay)
        outbox.send(number)
        began = time.monotonic()
        while len(outbox.sink.payloads) <= number:
            assert relay.await_transactions(LONG)
            drain(relay)
        assert time.monotonic() - began < LONG / 2
    assert outbox.sink.payloads == [0, 1, 2, 3, 4]


@pytest.mark.req("OB-26")
@pytest.mark.parametrize(
    "given", [{"delay": 0.2}, {"at": datetime(2020, 1, 1, tzinfo=UTC)}], ids=["soon", "past"]
)
def test_a_message_that_is_due_soon_does_not_wait_for_the_next_look(
    outbox: OutboxWorld, given: dict[str, Any]
) -> None:
    relay = outbox.relay()
    quiet(relay)
    outbox.send("soon", **given)
    began = time.monotonic()
    while not outbox.sink.payloads:
        assert relay.await_transactions(LONG)
        drain(relay)
    assert time.monotonic() - began < LONG / 2


@pytest.mark.req("OB-26")
def test_a_message_that_wakes_a_relay_waits_for_few_statements(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    quiet(relay)
    outbox.send("one")
    statements: list[str] = []
    event.listen(outbox.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert len(relay.fetch_transactions(16)) == 1
    lock = outbox.engine.dialect.name == "postgresql"
    assert len(statements) == 3 + lock, statements  # look, lock, choose, claim


@pytest.mark.req("OB-14")
def test_the_end_of_a_claim_ends_the_wait(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    outbox.send("one")
    quiet_first = relay.fetch_transactions(16)
    outbox.send("two")
    assert relay.fetch_transactions(16) == []  # its target is busy
    until(lambda: not relay.await_transactions(0.1) or not relay.fetch_transactions(16))
    relay.publish(quiet_first[0])
    assert relay.await_transactions(LONG)
    drain(relay)
    assert outbox.sink.payloads == ["one", "two"]


@pytest.mark.req("OB-14")
def test_a_message_that_is_delayed_ends_the_wait_when_it_is_due(outbox: OutboxWorld) -> None:
    relay = outbox.relay()
    outbox.send("later", delay=0.5)
    began = time.monotonic()
    while not outbox.sink.payloads:
        drain(relay)
        assert relay.await_transactions(LONG)
        drain(relay)
    assert 0.3 < time.monotonic() - began < LONG / 2


@pytest.mark.req("OB-14", "WK-04")
def test_behind_a_pooler_in_transaction_mode_the_relay_polls_and_says_so_once(
    outbox: OutboxWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if outbox.engine.dialect.name == "sqlite":
        return  # it has no server to listen to
    monkeypatch.setattr(listen, "ECHO", 0.2)
    with deaf_pooler(server_of(outbox.engine)) as port, caplog.at_level(logging.WARNING, "onceward.db"):
        url = make_url(outbox.engine.url)
        options = {"options": url.query.get("options", ""), "sslmode": "disable"}
        deaf = create_engine(url.set(host="127.0.0.1", port=port, query=options))
        relay = Relay(deaf, lambda target: outbox.sinks.setdefault(target, outbox.sink))
        until(
            lambda: (
                drain(relay) or (relay.await_transactions(1.0), "LISTEN does not work here" in caplog.text)[1]
            )
        )
        for number in range(3):
            outbox.send(number)
            until(
                lambda number=number: (
                    relay.await_transactions(1.0),
                    drain(relay),
                    outbox.sink.payloads[-1:] == [number],
                )[2]
            )  # type: ignore[misc]
        relay.close()
        deaf.dispose()
    assert caplog.text.count("LISTEN does not work here") == 1


def server_of(engine: Engine) -> Any:
    from pathlib import Path

    return Path(str(engine.url.query["host"])) / ".s.PGSQL.5432"


@pytest.mark.req("OB-14", "WK-04")
def test_a_broken_connection_is_listened_on_again(outbox: OutboxWorld) -> None:
    if outbox.engine.dialect.name == "sqlite":
        return
    relay = outbox.relay()
    quiet(relay)
    with outbox.engine.connect() as connection:
        listening = "SELECT pid FROM pg_stat_activity WHERE query = 'LISTEN onceward_outbox'"
        pids = set(connection.exec_driver_sql(listening).scalars())
        assert len(pids) == 1
        connection.exec_driver_sql(f"SELECT pg_terminate_backend({next(iter(pids))})")
        connection.rollback()
        assert relay.await_transactions(LONG)
        until(
            lambda: (
                relay.await_transactions(0.1),
                connection.rollback(),
                set(connection.exec_driver_sql(listening).scalars()) - pids,
            )[2]
        )
    quiet(relay)
    outbox.send("one")
    while not outbox.sink.payloads:
        assert relay.await_transactions(LONG)
        drain(relay)
