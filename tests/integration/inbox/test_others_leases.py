"""Leases of other processes: a copy that waits here does not prolong a start whose process may be dead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from onceward._sync import run_blocking
from onceward.inbox import Contract, Inbox
from onceward.inbox.attempts import Company, End
from onceward.inbox.stores.types import Key

CONTRACT = Contract(
    consumer_id="billing",
    event_types=["*"],
    owner_team="team",
    idempotency_mechanism="row in one transaction",
)
KEY = Key("billing", "e1", 20_000)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'inbox.db'}")
    Inbox(engine).migrate()
    yield engine
    engine.dispose()


def locked_until(engine: Engine) -> float:
    with engine.connect() as connection:
        return float(connection.scalar(text("SELECT locked_until FROM onceward_attempts")))


@pytest.mark.req("CC-012")
def test_extending_what_waits_here_leaves_the_lease_of_another_process_alone(engine: Engine) -> None:
    moment = 1_000.0
    dead = Inbox(engine, clock=lambda: moment).processor.ledger
    alive = Inbox(engine, clock=lambda: moment).processor.ledger
    run_blocking(dead.expect(CONTRACT, [KEY]))
    begun = locked_until(engine)
    moment += 30
    run_blocking(alive.extend(CONTRACT, [KEY.tracking_id]))
    assert locked_until(engine) == begun
    moment += CONTRACT.lease
    assert run_blocking(alive.start(CONTRACT, KEY)) is None, "free again: a suspect, which has to run alone"
    assert run_blocking(alive.start(CONTRACT, KEY, company=Company.OTHER_INBOXES)) is not None


@pytest.mark.req("CC-012")
def test_extending_keeps_our_own_lease_until_the_start_has_an_end(engine: Engine) -> None:
    moment = 1_000.0
    ours = Inbox(engine, clock=lambda: moment).processor.ledger
    start = run_blocking(ours.expect(CONTRACT, [KEY]))[KEY.tracking_id]
    moment += 30
    run_blocking(ours.extend(CONTRACT, [KEY.tracking_id]))
    assert locked_until(engine) == moment + CONTRACT.lease
    run_blocking(ours.end([End(KEY, start.token, "it failed")]))
    assert ours._open == set()
