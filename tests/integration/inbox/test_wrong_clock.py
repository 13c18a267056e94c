"""Claims, purges and redriven letters when somebody sets the clock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from onceward._sync import run_blocking
from onceward.deadletters import DeadLetters
from onceward.inbox import ClockDoubtError, Contract, Inbox
from onceward.inbox.attempts import Company
from onceward.inbox.errors import Busy
from onceward.inbox.stores.types import Key
from onceward.storage import clocks, database
from tests.support.wrong_clock import WrongClock

DAY = 86400.0
CONTRACT = Contract(
    consumer_id="billing", event_types=["paid"], owner_team="t", idempotency_mechanism="inbox", lease=60.0
)


class Machine:
    """A machine whose wall clock can be set, and which can be restarted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = time.time()
        self.wrong = self.passed = 0.0
        self.boot, self._booted = "one", -100.0
        monkeypatch.setattr(clocks, "boot_id", lambda: self.boot)
        monkeypatch.setattr(clocks, "uptime", lambda: self.passed - self._booted)
        monkeypatch.setattr(database.time, "time", lambda: self.began + self.passed + self.wrong)

    def restart(self) -> None:
        self.boot, self._booted = f"{self.boot} more", self.passed - 20.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    made = create_engine(f"sqlite:///{tmp_path / 'inbox.db'}")
    yield made
    made.dispose()


def inbox_on(engine: Engine) -> Inbox:
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(CONTRACT)
    return inbox


def start(inbox: Inbox, tracking_id: str = "e1") -> Any:
    return run_blocking(
        inbox.processor.ledger.start(CONTRACT, Key("billing", tracking_id, 20000), Company.NONE)
    )


@pytest.mark.req("CN-08")
def test_a_clock_that_is_set_ahead_does_not_end_a_claim(engine: Engine, machine: Machine) -> None:
    assert start(inbox_on(engine)) is not None
    other = Inbox(engine)
    for _ in range(5):
        machine.wrong += 8 * DAY
        with pytest.raises(Busy):
            start(other)
    machine.passed += 61.0
    assert start(other) is not None, "the lease is over when its time has passed"


@pytest.mark.req("CN-08")
def test_a_clock_that_is_set_back_does_not_prolong_a_claim(engine: Engine, machine: Machine) -> None:
    start(inbox_on(engine))
    machine.wrong = -3600.0
    machine.passed += 61.0
    assert start(Inbox(engine)) is not None


@pytest.mark.req("CN-08")
def test_after_a_restart_of_the_machine_nobody_has_a_claim(engine: Engine, machine: Machine) -> None:
    start(inbox_on(engine))
    machine.wrong = -30 * DAY
    machine.restart()
    assert start(Inbox(engine)) is not None


@pytest.mark.req("CN-09")
@pytest.mark.parametrize("ahead", [100 * DAY, 3600.0])
def test_a_purge_removes_nothing_by_a_clock_that_was_set_ahead(
    engine: Engine, machine: Machine, ahead: float
) -> None:
    inbox = inbox_on(engine)
    start(inbox)
    machine.passed += 50 * DAY
    machine.wrong = ahead
    for purge in (Inbox(engine).purge, lambda: DeadLetters(engine).purge(operator="anna")):
        with pytest.raises(ClockDoubtError, match="ahead since") as raised:
            purge()
        assert "`onceward" in str(raised.value)
        assert "purge --trust-clock`" in str(raised.value)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM onceward_horizons")).scalar_one() == 0
    machine.wrong = 0.0
    Inbox(engine).purge()


@pytest.mark.req("CN-09")
def test_an_operator_confirms_the_time_once(engine: Engine, machine: Machine) -> None:
    inbox_on(engine)
    machine.wrong = 100 * DAY
    Inbox(engine).purge(trust_clock=True, operator="anna")
    Inbox(engine).purge()
    assert DeadLetters(engine).purge(operator="anna") == 0
    machine.passed += 30 * DAY
    Inbox(engine).purge()


@pytest.mark.req("CN-09")
@pytest.mark.parametrize(("off", "is_doubted"), [(7 * DAY, False), (8 * DAY, True), (-8 * DAY, False)])
def test_a_machine_may_be_off_for_a_week(
    engine: Engine, machine: Machine, off: float, is_doubted: bool
) -> None:
    """Also if a consumer has registered with the doubtful time before."""
    inbox_on(engine)
    machine.wrong = off
    machine.restart()
    inbox_on(engine)
    machine.passed += 10 * DAY
    if is_doubted:
        with pytest.raises(ClockDoubtError, match="the last time known to be right"):
            Inbox(engine).purge()
        Inbox(engine).purge(trust_clock=True)
    if off < 0:
        machine.wrong = 0.0  # the machine has asked for the time
    Inbox(engine).purge()


@pytest.mark.req("CN-09")
def test_a_service_may_be_down_for_long_on_a_machine_that_runs(engine: Engine, machine: Machine) -> None:
    inbox_on(engine)
    machine.passed += 400 * DAY
    Inbox(engine).purge()
    assert DeadLetters(engine).purge(operator="anna") == 0


@pytest.mark.req("CN-09")
def test_on_a_real_machine_a_purge_with_a_wrong_clock_names_the_option(
    engine: Engine, tmp_path: Path
) -> None:
    inbox_on(engine)
    clock = WrongClock(tmp_path)
    clock.set("+100d")
    command = [sys.executable, "-m", "onceward", "inbox", "purge", "--database", str(engine.url)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], env=clock.env, capture_output=True, text=True, timeout=120, check=False
        )

    refused = run()
    assert refused.returncode == 1
    assert "it was set 100.0 days ahead" in refused.stderr
    assert "--trust-clock" in refused.stderr
    assert run("--trust-clock").returncode == 0
