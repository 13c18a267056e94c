"""A clock that jumps removes no fact, whether the server runs meanwhile or not."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onceward._time import Moment, WatchedClock
from onceward.boundary import BoundaryClient
from onceward.boundary.boundary import Boundary, BoundarySettings, tolerance_of
from onceward.boundary.model import envelope_for, fact_of
from onceward.boundary.retention import LEAST, Retention
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.cli.main import app
from onceward.testing.boundary import fact as plain
from tests.support.boundary.server import served
from tests.support.processes import LoggedProcess
from tests.support.wait import until
from tests.support.wrong_clock import WrongClock

DAY = 86400.0
HOUR = 3600.0
NOW = 1_800_000_000.0


class Machine:
    """A boundary on a machine whose wall clock can be set."""

    def __init__(self, store: SqliteBoundaryStore, settings: BoundarySettings) -> None:
        self.store = store
        self.wrong = 0.0
        self.passed = 0.0
        self.settings = settings
        self.boots = 0
        self.restart()

    def start(self) -> None:
        """A new server process."""
        self.boundary = Boundary(self.store, self.settings)
        tolerance = tolerance_of(self.settings.shortest_retention)
        self.boundary.clock = WatchedClock(self.wall, self.uptime, f"boot {self.boots}", tolerance=tolerance)
        self.retention = Retention(self.boundary)

    def restart(self) -> None:
        """Another start of the machine, with a new server process."""
        self.boots += 1
        self.booted_at = self.passed
        self.start()

    def wall(self) -> float:
        return NOW + self.passed + self.wrong

    def uptime(self) -> float:
        return 20.0 + self.passed - self.booted_at

    def wait(self, seconds: float) -> None:
        self.passed += seconds

    async def append(self, message_id: str, age: float = 0.0, **more: Any) -> None:
        at = int((NOW + self.passed - age) * 1000)
        await self.store.append(plain(message_id, appended_at=at, **more))

    async def facts(self) -> int:
        return len(await self.store.read(0, 1000))

    @property
    def halted(self) -> bool:
        return self.boundary.metrics.registry.get_sample_value("onceward_boundary_expiry_halted") == 1.0


def on_machine(place: Path, body: Callable[[Machine], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        store = SqliteBoundaryStore(place)
        try:
            await body(Machine(store, BoundarySettings(**settings)))
        finally:
            await store.close()

    asyncio.run(main())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.req("BC-51")
@pytest.mark.parametrize("jump", [8 * DAY, 365 * DAY, 2 * HOUR, -2 * HOUR, -8 * DAY])
def test_a_clock_that_jumps_while_the_server_runs_halts_expiry_until_it_is_corrected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, jump: float
) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1", age=6.9 * DAY)
        await machine.append("m2")
        assert await machine.retention.sweep() == 0
        assert not machine.halted
        machine.wrong = jump
        for _ in range(5):
            machine.wait(60)
            assert await machine.retention.sweep() == 0
        assert machine.halted
        assert await machine.facts() == 2
        (warning,) = warnings_in(caplog)
        assert "it was set to" in warning
        assert ("ahead" if jump > 0 else "behind") in warning
        assert "`onceward boundary trust-clock --store STORE`" in warning
        machine.wrong = 0.0
        machine.wait(DAY)
        assert await machine.retention.sweep() == 1, "it continues by itself, with the right time"
        assert not machine.halted

    on_machine(tmp_path, body)


@pytest.mark.req("BC-51")
@pytest.mark.parametrize("jump", [30.0, -30.0, 1200.0])
def test_a_small_correction_of_the_clock_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, jump: float
) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1", age=8 * DAY)
        await machine.append("m2")
        await machine.store.trust_time(Moment(NOW))
        await machine.retention.sweep()
        machine.wrong = jump
        machine.wait(60)
        await machine.append("m3", age=8 * DAY)
        assert await machine.retention.sweep() == 1
        assert warnings_in(caplog) == []

    on_machine(tmp_path, body)


@pytest.mark.req("BC-51")
def test_an_operator_confirms_the_time_and_facts_expire_again(tmp_path: Path) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1", age=1 * DAY)
        await machine.append("m2")
        await machine.retention.sweep()
        machine.wrong = 8 * DAY
        await machine.retention.sweep()
        await machine.store.trust_time(Moment(machine.wall()))
        assert await machine.retention.sweep() == 2
        assert not machine.halted

    on_machine(tmp_path, body)


@pytest.mark.req("BC-51")
def test_a_server_with_another_time_confirms_nothing(tmp_path: Path) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1")
        await machine.retention.sweep()
        machine.wrong = 8 * DAY
        for _ in range(3):
            machine.wait(60)
            await machine.store.trust_time(Moment(machine.wall() - machine.wrong))
            assert await machine.retention.sweep() == 0
        assert machine.halted

    on_machine(tmp_path, body)


@pytest.mark.req("BC-51")
@pytest.mark.parametrize("jump", [-30 * DAY, 30 * DAY])
def test_a_fact_is_not_stored_with_a_wrong_time(tmp_path: Path, jump: float) -> None:
    async def body(machine: Machine) -> None:
        await machine.retention.sweep()
        machine.wrong = jump
        machine.wait(60)
        await machine.boundary.append(
            envelope_for("m", from_zone="a", to_zone="b"), fact_of("a:b", "done", 1)
        )
        ((_, _, at),) = await machine.store.read(0, 10)
        assert at == (NOW + 60) * 1000

    on_machine(tmp_path, body)


@pytest.mark.req("BC-52")
def test_a_clock_that_jumps_while_the_machine_is_off_halts_expiry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(machine: Machine) -> None:
        for number in range(20):
            await machine.append(f"m{number}", age=HOUR)
        await machine.retention.sweep()
        machine.wrong = 8 * DAY
        machine.restart()
        for _ in range(3):
            assert await machine.retention.sweep() == 0
            await machine.append("appended with the wrong clock", age=-8 * DAY)
            machine.wait(60)
        machine.start()
        assert await machine.retention.sweep() == 0, "neither another start nor a new fact confirms it"
        assert machine.halted
        assert "8.0 days ago, before this machine was started" in warnings_in(caplog)[0]
        assert len(warnings_in(caplog)) == 2, "one for each process"
        await machine.store.trust_time(Moment(machine.wall()))
        assert await machine.retention.sweep() == LEAST

    on_machine(tmp_path, body)


@pytest.mark.req("BC-51")
@pytest.mark.parametrize("jump", [8 * DAY, 2 * HOUR, -2 * HOUR])
def test_a_clock_that_jumps_while_the_server_is_down_is_noticed_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, jump: float
) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1", age=6.9 * DAY)
        await machine.append("m2")
        await machine.retention.sweep()
        machine.wrong = jump
        machine.wait(HOUR)
        for _ in range(2):
            machine.start()
            assert await machine.retention.sweep() == 0
            assert machine.halted
        machine.wrong = 0.0
        machine.wait(DAY)
        assert await machine.retention.sweep() == 1
        assert len(warnings_in(caplog)) == 2, "one for each process"

    on_machine(tmp_path, body)


@pytest.mark.req("BC-51")
def test_a_server_may_be_down_for_a_week_on_a_machine_that_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1")
        await machine.retention.sweep()
        machine.wait(8 * DAY)
        machine.start()
        assert await machine.retention.sweep() == 1
        assert warnings_in(caplog) == []

    on_machine(tmp_path, body)


@pytest.mark.req("BC-52")
def test_a_store_of_an_older_version_is_judged_by_its_newest_fact(tmp_path: Path) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1", age=8 * DAY)
        await machine.append("m2", age=5 * DAY)
        assert await machine.retention.sweep() == 0
        assert machine.halted

    on_machine(tmp_path, body)


@pytest.mark.req("BC-52")
@pytest.mark.parametrize(("off", "retention"), [(3 * DAY, 7 * DAY), (1800.0, 60.0)])
def test_a_machine_that_was_off_for_a_while_lets_facts_expire_as_usual(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, off: float, retention: float
) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1", age=retention - 10)
        await machine.store.trust_time(Moment(NOW))
        assert await machine.retention.sweep() == 0
        machine.wait(off)
        machine.restart()
        assert await machine.retention.sweep() == 1
        assert warnings_in(caplog) == []

    on_machine(tmp_path, body, retention=dict.fromkeys(("operational", "audit", "documents"), retention))


@pytest.mark.req("BC-52")
def test_only_classes_that_are_kept_shorter_wait_for_an_operator(tmp_path: Path) -> None:
    async def body(machine: Machine) -> None:
        await machine.append("m1", age=360 * DAY, stream="audit")
        await machine.append("m2")
        await machine.retention.sweep()
        machine.wait(10 * DAY)
        machine.restart()
        assert await machine.retention.sweep() == 1
        assert [each[0] for each in await machine.store.read(0, 10)] == [2]
        assert machine.halted

    on_machine(tmp_path, body, retention={"audit": 365 * DAY})


@pytest.mark.req("BC-52")
def test_a_clock_behind_the_last_trusted_time_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without a battery starts in 1970, and asks for the time a little later."""

    async def body(machine: Machine) -> None:
        await machine.append("m1", age=6.9 * DAY)
        await machine.store.trust_time(Moment(NOW))
        await machine.retention.sweep()
        machine.wait(DAY)
        machine.wrong = -NOW
        machine.restart()
        assert await machine.retention.sweep() == 0
        assert "behind: it was set to 1970-01-0" in warnings_in(caplog)[0]
        await machine.boundary.append(
            envelope_for("m2", from_zone="a", to_zone="b"), fact_of("a:b", "done", 1)
        )
        machine.wrong = 0.0
        machine.wait(60)
        assert await machine.retention.sweep() == 1
        assert not machine.halted
        ((offset, _, at),) = await machine.store.read(0, 10)
        assert offset == 2
        assert at >= NOW * 1000

    on_machine(tmp_path, body)


@pytest.mark.req("BC-52")
def test_one_sweep_removes_only_a_share_of_the_log(tmp_path: Path) -> None:
    async def body(machine: Machine) -> None:
        await machine.store.append_all(
            [plain(f"m{number}", appended_at=int((NOW - 8 * DAY) * 1000)) for number in range(500)]
        )
        await machine.store.trust_time(Moment(NOW))
        assert await machine.retention.sweep() == 50
        assert await machine.retention.sweep() == 45
        for _ in range(40):
            await machine.retention.sweep()
        assert await machine.facts() == 0, "in the end, all that have expired are gone"

    on_machine(tmp_path, body)


SERVER = """
import asyncio, sys
from onceward.boundary.boundary import Boundary
from onceward.boundary.retention import Retention
from onceward.boundary.server.process import start_logging
from onceward.boundary.stores.sqlite import SqliteBoundaryStore

async def main():
    boundary = Boundary(SqliteBoundaryStore(sys.argv[1]))
    await Retention(boundary, every=0.02).start()

start_logging("json", "info")
asyncio.run(main())
"""


def stored_facts(place: Path) -> int:
    with closing(sqlite3.connect(place / "boundary.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM facts").fetchone()[0])


@pytest.mark.req("BC-51", "BC-52")
@pytest.mark.parametrize("while_it_runs", [True, False])
def test_on_a_real_machine_a_wrong_clock_removes_nothing_until_somebody_confirms_it(
    tmp_path: Path, while_it_runs: bool
) -> None:
    place, clock = tmp_path / "data", WrongClock(tmp_path)

    async def append() -> None:
        store = SqliteBoundaryStore(place)
        for number in range(8):
            await store.append(plain(f"m{number}"))
        await Retention(Boundary(store)).sweep()
        await store.close()

    asyncio.run(append())
    if not while_it_runs:
        clock.set("+8d")
    server = LoggedProcess([sys.executable, "-c", SERVER, str(place)], tmp_path / "server.log", env=clock.env)
    try:
        if while_it_runs:
            until(lambda: _trusted(place) > time.time() - 1)
            clock.set("+8d")
        until(lambda: "expiry_halted" in server.log)
        assert stored_facts(place) == 8
        if not while_it_runs:
            return
        assert CliRunner().invoke(app, ["boundary", "trust-clock", "--store", str(place)]).exit_code == 0
        time.sleep(0.2)
        assert stored_facts(place) == 8, "this process has the right time, which confirms nothing"
        with_wrong_clock = LoggedProcess(
            [sys.executable, "-m", "onceward", "boundary", "trust-clock", "--store", str(place)],
            tmp_path / "confirm.log",
            env=clock.env,
        )
        assert with_wrong_clock.process.wait(60) == 0, with_wrong_clock.log
        until(lambda: stored_facts(place) == 0)
        assert "expiry_resumed" in server.log
    finally:
        server.kill()


@pytest.mark.req("BC-51")
@pytest.mark.parametrize(
    "while_it_serves", [False, pytest.param(True, marks=pytest.mark.long)], ids=["meanwhile down", "serving"]
)
def test_a_server_whose_clock_is_set_ahead_keeps_all_facts_and_warns(
    tmp_path: Path, while_it_serves: bool
) -> None:
    place, clock = tmp_path / "data", WrongClock(tmp_path)
    with served(place, env=clock.env_of_server) as server, BoundaryClient(server.url) as client:
        for number in range(8):
            client.append(
                envelope_for(f"m{number}", from_zone="a", to_zone="b"), fact_of("a:b", "done", number)
            )
        until(lambda: _trusted(place) > time.time() - 60)
        if while_it_serves:
            clock.set("+8d")
            until(lambda: "expiry_halted" in server.log, 90.0)  # it looks once a minute
            client.append(envelope_for("m8", from_zone="a", to_zone="b"), fact_of("a:b", "done", 8))
            assert stored_facts(place) == 9
            assert newest_fact(place) < time.time() + HOUR
            return
        assert server.end(signal.SIGTERM)[0] == 0
    clock.set("+8d")
    with served(place, env=clock.env_of_server) as server:
        until(lambda: "expiry_halted" in server.log)
        assert "`onceward boundary trust-clock --store STORE`" in server.log
        assert stored_facts(place) == 8


@pytest.mark.req("BC-51")
def test_a_server_whose_clock_is_set_back_answers_waits_in_time(tmp_path: Path) -> None:
    clock = WrongClock(tmp_path)
    with served(tmp_path / "data", env=clock.env_of_server) as server, BoundaryClient(server.url) as client:
        assert client.fetch("c").facts == ()
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.fetch, "c", wait=2.0)
            time.sleep(0.5)  # so it waits when the clock is set
            clock.set("-1h")
            assert waiting.result(60).facts == ()
        assert 1.9 < time.monotonic() - began < 30


def newest_fact(place: Path) -> float:
    with closing(sqlite3.connect(place / "boundary.db")) as connection:
        return float(connection.execute("SELECT max(appended_at) FROM facts").fetchone()[0]) / 1000


def _trusted(place: Path) -> float:
    with closing(sqlite3.connect(place / "boundary.db")) as connection:
        found = connection.execute("SELECT moment FROM trusted").fetchone()
        return float(json.loads(found[0])["at"]) if found else 0.0


@pytest.mark.req("BC-52")
def test_a_store_without_a_trusted_time_is_upgraded(tmp_path: Path) -> None:
    async def write() -> None:
        store = SqliteBoundaryStore(tmp_path)
        await store.append(plain("m1"))
        await store.close()

    async def read() -> None:
        store = SqliteBoundaryStore(tmp_path)
        assert await store.trusted_time() is None
        await store.trust_time(Moment(1000.0))
        assert len(await store.read(0, 10)) == 1
        await store.close()

    asyncio.run(write())
    with closing(sqlite3.connect(tmp_path / "boundary.db")) as connection:
        connection.execute("DROP TABLE trusted")
        connection.execute("DROP TABLE holes")
        connection.execute("ALTER TABLE removed DROP COLUMN steps")
        connection.execute("ALTER TABLE cursors DROP COLUMN after_step")
        connection.execute("PRAGMA user_version = 1")
    asyncio.run(read())


@pytest.mark.req("BC-51")
def test_the_command_names_what_is_wrong_with_its_store(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["boundary", "trust-clock", "--store", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "--store: there is no boundary in" in result.stderr
