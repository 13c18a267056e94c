"""Leases and delays when somebody sets the clock."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward.connectors import SqliteConnector
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.connectors.sqlite import store
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.testing.servers import redis_server
from onceward.transaction import Settlement, Transaction, Verdict
from tests.support.wait import until
from tests.support.wrong_clock import WrongClock

PROGRAM = """
import asyncio, sys, time
from pathlib import Path
from onceward.connectors import AsyncMemoryConnector, AsyncSqliteConnector, MemoryConnector, SqliteConnector
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.transaction import Settlement, Transaction, Verdict
from tests.support.wrong_clock import WrongClock

clock = WrongClock(Path(sys.argv[1]))
FAILURE = TransactionException("later", category=ExceptionCategory.SYSTEM)

class Blocking:
    def __init__(self, connector):
        self.connector = connector
    async def __call__(self, name, *args):
        return getattr(self.connector, name)(*args)

class Asynchronous(Blocking):
    async def __call__(self, name, *args):
        return await getattr(self.connector, name + "_async")(*args)

async def due(queue):
    "A failed message comes back after its delay, though the clock is set back in between."
    clock.set("+0")
    await queue("dispatch_transactions", [Transaction(id="m", payload={})])
    [message] = await queue("fetch_transactions", 1)
    real = time.monotonic()
    await queue("settle_transactions", [Settlement(message, Verdict.FAILED, FAILURE)])
    clock.set("-1h")
    while not (batch := await queue("fetch_transactions", 1)):
        assert time.monotonic() - real < 30, "the delay became an hour"
        await asyncio.sleep(0.01)
    assert time.monotonic() - real >= 0.04  # less a fifth: its jitter
    await queue("settle_transactions", [Settlement(batch[0], Verdict.DONE)])

async def held(queue):
    "What is in flight stays so, though the clock is set ahead again and again."
    clock.set("+0")
    await queue("dispatch_transactions", [Transaction(id="m", payload={})])
    [message] = await queue("fetch_transactions", 1)
    for days in range(1, 7):
        clock.set(f"+{days}d")
        assert await queue("fetch_transactions", 1) == []
    assert (await queue("counts"))["leased"] == 1
    await queue("settle_transactions", [Settlement(message, Verdict.DONE)])
    assert sum((await queue("counts")).values()) == 0

async def main():
    rules = {"redelivery_delay": 0.05, "lease": 60.0}
    place = Path(sys.argv[1])
    both = [
        Blocking(SqliteConnector(place / "blocking.db", synchronous="OFF", **rules)),
        Asynchronous(AsyncSqliteConnector(place / "asyncio.db", synchronous="OFF", **rules)),
        Blocking(MemoryConnector(**rules)),
        Asynchronous(AsyncMemoryConnector(**rules)),
    ]
    for queue in both:
        await due(queue)
        if not isinstance(queue.connector, AsyncSqliteConnector):  # whose thread libfaketime delays for seconds
            await held(queue)
        await queue("close")

asyncio.run(main())
"""
FETCH = """
import sys
from onceward.connectors import SqliteConnector
with SqliteConnector(sys.argv[1]) as queue:
    print([each.id for each in queue.fetch_transactions(10)])
"""
FAILURE = TransactionException("later", category=ExceptionCategory.SYSTEM)


@pytest.mark.req("CN-07")
def test_a_clock_that_is_set_neither_ends_a_lease_nor_prolongs_a_delay(tmp_path: Path) -> None:
    clock = WrongClock(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=clock.env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.req("CN-07")
@pytest.mark.parametrize("offset", ["+8d", "-1h"])
def test_a_process_with_another_clock_shares_the_queue(tmp_path: Path, offset: str) -> None:
    clock, place = WrongClock(tmp_path), tmp_path / "queue.db"
    clock.set(offset)

    def fetch_there() -> str:
        command = [sys.executable, "-c", FETCH, str(place)]
        return subprocess.run(
            command, env=clock.env, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    with SqliteConnector(place, redelivery_delay=0.01) as queue:
        queue.dispatch_transactions(
            [Transaction(id="held", payload={}), Transaction(id="failed", payload={})]
        )
        _held, failed = queue.fetch_transactions(2)
        queue.settle_transactions([Settlement(failed, Verdict.FAILED, FAILURE)])
        time.sleep(0.02)
        assert fetch_there() == "['failed']\n"


# ── another start of the machine ────────────────────────────────────────────────────────────────────────


def queue_before(place: Path) -> None:
    with SqliteConnector(place, redelivery_delay=50.0) as queue:
        queue.dispatch_transactions([Transaction(id=each, payload={}) for each in ("held", "failed")])
        _held, failed = queue.fetch_transactions(2)
        queue.settle_transactions([Settlement(failed, Verdict.FAILED, FAILURE)])


@pytest.mark.req("CN-07")
@pytest.mark.parametrize(
    ("off_for", "expected"),
    [(0.0, ["held"]), (100.0, ["failed", "held"]), (-1e9, ["failed", "held"])],
)
def test_after_a_restart_of_the_machine_leases_are_over_and_delays_last_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_for: float, expected: list[str]
) -> None:
    """In the last case, the machine has lost the time."""
    queue_before(tmp_path / "queue.db")
    wall = time.time() + off_for
    monkeypatch.setattr(store, "boot_id", lambda: "another")
    monkeypatch.setattr(store, "uptime", lambda: 10.0)
    monkeypatch.setattr(store.time, "time", lambda: wall)
    with SqliteConnector(tmp_path / "queue.db") as queue:
        assert sorted(each.id for each in queue.fetch_transactions(10)) == expected
        assert queue.fetch_transactions(10) == []


@pytest.mark.req("CN-07")
def test_a_queue_of_the_version_before_gets_a_clock(tmp_path: Path) -> None:
    queue_before(tmp_path / "queue.db")
    connection = store.sqlite3.connect(tmp_path / "queue.db")
    connection.execute("DROP TABLE clock")
    connection.execute("PRAGMA user_version = 4")
    connection.close()
    with SqliteConnector(tmp_path / "queue.db") as queue:
        assert queue.counts() == {"ready": 0, "leased": 1, "delayed": 1, "dead": 0}


@pytest.mark.req("CN-07")
def test_a_clock_that_was_not_stored_is_not_kept(tmp_path: Path) -> None:
    with SqliteConnector(tmp_path / "queue.db") as one, SqliteConnector(tmp_path / "queue.db") as two:
        rows: Any = one._rows

        def interrupted() -> None:
            with rows.transaction(1.0):
                rows.now()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        for each in (two, one):
            with each._rows.transaction(1.0):
                each._rows.now()
        assert one._rows._ahead == two._rows._ahead


@pytest.mark.req("CN-07")
def test_a_system_without_such_a_clock_uses_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "boot_id", lambda: "")
    queue_before(tmp_path / "queue.db")
    with SqliteConnector(tmp_path / "queue.db") as queue:
        assert queue.counts() == {"ready": 0, "leased": 1, "delayed": 1, "dead": 0}


# ── the clock of a Redis server ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def server_clock(tmp_path: Path) -> WrongClock:
    return WrongClock(tmp_path)


@pytest.fixture
def server(server_clock: WrongClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Valkey server on a machine of its own, so to speak."""
    with monkeypatch.context() as environment:
        environment.delenv("ONCEWARD_TEST_REDIS_URL", raising=False)
        for name, value in server_clock.env.items():
            environment.setenv(name, value)
        running = redis_server()
        made = running.__enter__()
    try:
        yield made.url
    finally:
        running.__exit__(None, None, None)


@pytest.mark.req("CN-10")
def test_a_redis_whose_clock_is_set_ahead_delivers_again_what_is_in_flight_and_loses_nothing(
    server: str, server_clock: WrongClock
) -> None:
    with (
        RedisStreamsConnector(server, "s", lease=60.0) as one,
        RedisStreamsConnector(server, "s", lease=60.0) as two,
    ):
        one.dispatch_transactions([Transaction(id="m", payload={})])
        [held] = one.fetch_transactions(1)
        assert two.fetch_transactions(1) == []
        server_clock.set("+1h")
        found: list[Transaction] = []
        until(lambda: found.extend(two.fetch_transactions(1)) or found)
        assert [each.id for each in found] == ["m"]
        one.settle_transactions([Settlement(held, Verdict.DONE)])  # too late: it belongs to the other
        two.settle_transactions([Settlement(found[0], Verdict.DONE)])
        assert two.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("CN-10")
def test_a_redis_whose_clock_is_set_back_keeps_what_is_held_until_the_clock_has_caught_up(
    server: str, server_clock: WrongClock
) -> None:
    server_clock.set("+1h")
    with (
        RedisStreamsConnector(server, "s", lease=0.2) as dead,
        RedisStreamsConnector(server, "s", lease=0.2) as two,
    ):
        dead.dispatch_transactions([Transaction(id="m", payload={})])
        assert dead.fetch_transactions(1)
        server_clock.set("+0")
        time.sleep(0.5)
        assert two.fetch_transactions(1) == [], "as if its consumer were alive"
        assert two.counts()["leased"] == 1
        server_clock.set("+1h")
        found: list[Transaction] = []
        until(lambda: found.extend(two.fetch_transactions(1)) or found)
        assert [each.id for each in found] == ["m"]
