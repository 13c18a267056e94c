"""What holds consumers, read from SQLite and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from onceward._sync import run_blocking
from onceward.deadletters import Burial, Category, DeadLetters
from onceward.failures import records
from onceward.failures.records import FleetRecords, read_state
from onceward.failures.states import Paused
from onceward.inspection.holds import Holds, held_lines, read_holds
from onceward.limits import Limit
from onceward.limits.records import Wish
from onceward.storage.database import BlockingStoragePorts, Sql
from tests.support.limits import engine_of, records_on
from tests.support.schema import url_of

pytestmark = pytest.mark.req("UI-20")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with url_of(request.param, tmp_path, request) as url:
        yield url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    with engine_of(url.replace("postgresql://", "postgresql+psycopg://", 1)) as engine:
        yield engine


@pytest.mark.req("OU-12")
def test_the_newest_reason_of_a_pause_counts_and_the_audit_has_them_all(engine: Engine) -> None:
    letters, ports = DeadLetters(engine), BlockingStoragePorts(engine)
    letters.migrate()
    now = [100.0]
    rows = Sql(engine.dialect.name, (lambda: now[0]) if engine.dialect.name == "sqlite" else None)
    identity = ("billing", "charge")

    def change(do: Any, operator: str, reason: str) -> tuple[bool, list[str]]:
        done = run_blocking(ports.transact(do, rows, identity, operator, reason))
        return done.changed, [each.reason for each in done.earlier]

    def paused() -> Paused:
        with engine.connect() as connection:
            return read_state(connection, rows).paused[identity]

    assert change(records.resume, "ann", "") == (False, [])
    assert change(records.pause, "ann", "until 14:00") == (True, [])
    began = paused().paused_at
    now[0] += 60
    assert change(records.pause, "ann", "until 16:00") == (True, ["until 14:00"])
    assert (paused().reason, paused().paused_at) == ("until 16:00", began), "ann paused it then"
    assert change(records.pause, "ann", " until 16:00 ") == (False, ["until 16:00"])
    assert change(records.pause, "ben", "") == (False, ["until 16:00"])
    assert change(records.pause, "ben", "until Monday") == (True, ["until 16:00"])
    assert (paused().operator, paused().reason) == ("ben", "until Monday")
    assert paused().paused_at > began
    assert change(records.resume, "ann", "it is over") == (True, ["until Monday"])
    entries = [(each["action"], json.loads(each["details"])) for each in letters.audit()][::-1]
    assert [(action, each["reason"], each.get("replaces")) for action, each in entries] == [
        ("pause", "until 14:00", None),
        ("pause", "until 16:00", {"operator": "ann", "reason": "until 14:00"}),
        ("pause", "until Monday", {"operator": "ann", "reason": "until 16:00"}),
        ("resume", "it is over", None),
    ]


@pytest.mark.req("OU-07")
def test_a_name_means_the_consumer_with_its_contract_too_if_it_ran_without_one_before(engine: Engine) -> None:
    DeadLetters(engine).migrate()
    ports = BlockingStoragePorts(engine)
    fleet, rows = FleetRecords(ports), Sql(engine.dialect.name)
    for identity in (("charge", "charge"), ("billing", "charge"), ("notices", "billing")):
        run_blocking(fleet.introduce(identity))

    def paused(consumer: str) -> set[tuple[str, str]]:
        run_blocking(ports.transact(records.pause, rows, consumer, "ann", "r"))
        found = set(run_blocking(fleet.read()).paused)
        run_blocking(ports.transact(records.resume, rows, consumer, "ann", "r"))
        assert not run_blocking(fleet.read()).paused
        return found

    assert paused("charge") == {("charge", "charge"), ("billing", "charge")}
    assert paused("billing") == {("billing", "charge")}, "an id comes before a name"
    assert paused("notices") == {("notices", "billing")}


def bury(letters: DeadLetters, *keys: str) -> None:
    for number, key in enumerate(keys):
        letters.bury(
            Burial(
                consumer="shipping", origin="here", message_id=f"m{number}", body=b"{}", category=Category.BUSINESS,
                reason="failed", error="no address", attempts=1, event_type="", order_key=key,
            )
        )  # fmt: skip


def test_before_the_first_run_nothing_holds_and_nothing_is_made(url: str, tmp_path: Path) -> None:
    assert read_holds(url) == Holds()
    assert held_lines(url, "shipping", 10) == ()
    assert not list(tmp_path.iterdir())


def test_pauses_outages_limits_and_held_keys_are_read(url: str, engine: Engine) -> None:
    letters, ports = DeadLetters(engine), BlockingStoragePorts(engine)
    letters.migrate()
    fleet, rows = FleetRecords(ports), Sql(engine.dialect.name)
    run_blocking(fleet.declare("dependency:payments", "refused", 60.0))
    identity = ("billing", "charge")
    assert run_blocking(ports.transact(records.pause, rows, identity, "ann", "maintenance")).changed
    assert not run_blocking(ports.transact(records.pause, rows, identity, "ben", "")).changed
    limit = records_on(engine, Limit(rate="30/m", concurrency=2, by="customer"), "scope")
    run_blocking(limit.begin())
    states = run_blocking(limit.take({"ann": Wish(4, 0), "ben": Wish(1, 0)}, 10, {}))
    run_blocking(limit.free({states["ben"].grants[0].token or "": 2.5}))
    found = read_holds(url)
    assert found.state.down["dependency:payments"].reason == "refused"
    assert 50 < found.state.down["dependency:payments"].due_in <= 60
    assert found.state.paused[identity].operator == "ann"
    use = found.limits["scope"]
    assert (use.words, use.running, use.keys, use.waiting_keys) == (
        "30/min and 2 at once, for each customer", 1, 2, 1,
    )  # fmt: skip
    assert [(each.key, each.seconds, each.running) for each in use.slow] == [("ben", 2.5, 0)]
    assert [(each.key, each.running) for each in use.waiting] == [("ann", 1)]
    assert use.waiting[0].back_in > 0
    bury(letters, "ann", "ben", "ann")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO onceward_held_keys VALUES ('shipping', 'ben', 7, '[]', 0)"))
    lines = held_lines(url, "shipping", 10)
    assert [(each.order_key, each.letter, each.letters, each.waiting) for each in lines] == [
        ("ann", 1, 2, None),
        ("ben", 2, 1, 7),
    ]
    assert [each.order_key for each in held_lines(url, "shipping", 1)] == ["ann"]
    assert held_lines(url, "billing", 10) == []
