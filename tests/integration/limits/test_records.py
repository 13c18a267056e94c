"""What limits count in the database, on SQLite and PostgreSQL: never above the limit, however many ask."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest
from sqlalchemy import Engine, text

from onceward._sync import run_blocking
from onceward.limits import Limit
from onceward.limits import records as limit_records
from onceward.limits.records import AHEAD, LEASE, KeyState, LimitRecords, Wish
from tests.support.limits import KEYS, closest, engine_of, hammer_together, prepare, records_on
from tests.support.schema import url_of


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with url_of(request.param, tmp_path, request) as url:
        yield url.replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    with engine_of(url) as engine:
        prepare(engine)
        yield engine


def numbers(engine: Engine, query: str) -> list[float]:
    with engine.connect() as connection:
        return list(connection.execute(text(query)).scalars())


class Hands:
    """A process that asks by a clock of the test."""

    def __init__(self, engine: Engine, limit: Limit, clock: list[float] | None = None) -> None:
        self.records = records_on(engine, limit, clock=None if clock is None else lambda: clock[0])
        run_blocking(self.records.begin())

    def take(self, starts: int, key: str = "", room: int = 1000, keeps: int = 1000) -> KeyState:
        return run_blocking(self.records.take({key: Wish(starts, keeps)}, room, {}))[key]

    def tokens(self, starts: int, key: str = "") -> list[str]:
        return [str(grant.token) for grant in self.take(starts, key).grants]


@pytest.mark.req("LI-01", "LI-02")
@pytest.mark.parametrize(
    "starts", [3_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])]
)
def test_several_processes_are_never_above_the_limit(starts: int, url: str, engine: Engine) -> None:
    hammer_together(url, "shop", "5000/s", 10, starts)
    assert numbers(engine, "SELECT count(*) FROM starts")[0] >= starts
    for key in KEYS:
        assert closest(numbers(engine, f"SELECT due FROM starts WHERE key = '{key}'")) >= 0.0002 * 0.99
    assert max(numbers(engine, "SELECT busy FROM most")) == 10
    assert numbers(engine, "SELECT count(*) FROM onceward_limit_slots") == [0]


@pytest.mark.usual("0.5/s", "7/s")
@pytest.mark.req("LI-01", "LI-02")
@pytest.mark.parametrize("rate", ["10/s", "0.5/s", "1000/s", "90/m", "7/s"])
def test_the_rate_is_exact_in_every_minute(rate: str, tmp_path: Path) -> None:
    """Processes that ask late, and in any order, with a simulated clock."""
    limit, clock, chance = Limit(rate=rate), [1000.0], Random(rate)
    with engine_of(f"sqlite:///{tmp_path}/shop.db") as engine:
        prepare(engine)
        fleet = [Hands(engine, limit, clock) for _ in range(3)]
        times: list[float] = []
        while clock[0] < 1190.0:
            state = chance.choice(fleet).take(2000)
            times += [clock[0] + grant.due_in for grant in state.grants]
            assert all(grant.due_in <= AHEAD for grant in state.grants)
            wait = max(state.next_in - AHEAD / 2, 0.0) + chance.uniform(
                0.0, AHEAD / 2
            )  # as the loop waits, and late
            clock[0] += wait
    expected = 60 / limit.every
    for begin in (1002.0, 1011.1, 1047.0, 1120.0):
        found = sum(begin <= each < begin + 60.0 for each in times)
        assert abs(found - expected) <= max(0.01 * expected, 1), (begin, found)
    assert closest(times) >= limit.every * (1 - 1e-6)


@pytest.mark.req("LI-01")
def test_there_is_no_burst_after_an_idle_time(engine: Engine) -> None:
    hands = Hands(engine, Limit(rate="5/s"))
    hands.take(1)
    time.sleep(0.5)
    dues = [grant.due_in for grant in hands.take(100).grants]
    assert len(dues) <= 6
    assert closest(dues) == pytest.approx(0.2)


@pytest.mark.req("LI-03")
def test_a_slot_whose_lease_has_ended_is_another_s_and_cannot_be_renewed(engine: Engine) -> None:
    stopped, other = Hands(engine, Limit(concurrency=1)), Hands(engine, Limit(concurrency=1))
    [token] = stopped.tokens(1)
    assert run_blocking(stopped.records.renew([token])) == {token}
    state = other.take(1)
    assert (state.grants, state.full) == ([], True)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE onceward_limit_slots SET held_until = held_until - {LEASE}"))
    [mine] = other.tokens(1)
    assert run_blocking(stopped.records.renew([token])) == set()
    run_blocking(stopped.records.free({token: 0.1}))
    assert other.tokens(1) == []
    assert run_blocking(other.records.renew([mine])) == {mine}
    run_blocking(other.records.free({mine: 0.1}))
    assert len(other.tokens(1)) == 1


@pytest.mark.req("LI-03")
def test_a_lease_that_cannot_be_true_ends(tmp_path: Path) -> None:
    """The machine was started again, with a clock that is hours behind."""
    clock = [10_000.0]
    with engine_of(f"sqlite:///{tmp_path}/shop.db") as engine:
        prepare(engine)
        limit = Limit(rate="10/s", concurrency=1)
        assert len(Hands(engine, limit, clock).tokens(1)) == 1
        clock[0] = 1_000.0
        state = Hands(engine, limit, clock).take(1)
        assert state.next_in <= 2 * AHEAD
        clock[0] += 2 * AHEAD
        assert len(Hands(engine, limit, clock).tokens(1)) == 1


@pytest.mark.req("LI-06")
def test_the_process_that_began_last_says_what_the_limit_is(engine: Engine) -> None:
    old = Hands(engine, Limit(concurrency=4))
    tokens = old.tokens(4)
    assert (len(tokens), old.records.hands_over) == (4, True)
    new = Hands(engine, Limit(concurrency=2))
    run_blocking(old.records.renew(tokens))
    assert not old.records.hands_over
    run_blocking(old.records.free({tokens[0]: 0.1, tokens[1]: 0.1}))
    assert old.tokens(4) == new.tokens(4) == []
    run_blocking(old.records.free({tokens[2]: 0.1}))
    assert len(old.tokens(4)) == 1
    faster = Hands(engine, Limit(rate="1/h"))
    assert len(faster.take(3).grants) == 1
    assert faster.take(3).grants == []
    fast = Hands(engine, Limit(rate="1000/s"))
    assert fast.take(1).next_in <= 2 * AHEAD, "it does not wait for the end of the hour"


@pytest.mark.req("LI-06")
def test_two_apps_with_the_same_consumer_do_not_share_a_limit(engine: Engine) -> None:
    one = records_on(engine, Limit(concurrency=1), '["shop", "charge"]')
    other = records_on(engine, Limit(concurrency=1), '["bank", "charge"]')
    for each in (one, other):
        run_blocking(each.begin())
        assert len(run_blocking(each.take({"": Wish(1, 0)}, 1, {}))[""].grants) == 1


@pytest.mark.req("LI-04")
def test_what_is_given_back_comes_again_as_often_as_it_can_start(engine: Engine) -> None:
    hands = Hands(engine, Limit(rate="1/s", by="key"))
    first = hands.take(100, "hot")
    assert len(first.grants) == 2
    assert len(first.returns) == 100 - 2 - 1, "one is kept for the next start"
    assert all(
        after - before == pytest.approx(0.5)
        for before, after in zip(first.returns, first.returns[1:], strict=False)
    )
    second = hands.take(10, "hot")
    assert second.returns[0] > first.returns[-1] - 2, "behind those that wait already"
    assert len(hands.take(1, "cold").grants) == 1


@pytest.mark.req("LI-04")
def test_keys_that_nobody_uses_are_removed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands(engine, Limit(rate="100/s", concurrency=2, by="key"))
    hands.tokens(1, "busy")
    for number in count():
        hands.take(1, f"key {number}", room=0)
        if number == 20:
            break
    monkeypatch.setattr(limit_records, "IDLE", -LEASE)
    run_blocking(hands.records.remove_idle())
    assert numbers(engine, "SELECT key FROM onceward_limit_keys") == ["busy"]
    assert isinstance(hands.records, LimitRecords)
