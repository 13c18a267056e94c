"""Redriving: refused without a reason, never faster than allowed, and followed up."""

from __future__ import annotations

import itertools
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import create_engine

from onceward.deadletters import Category, Failure, Filter, Rca, RedriveRefusedError, Status, redrive_leases
from onceward.deadletters.burial import burial_of
from onceward.deadletters.redrive import MOST
from onceward.inbox import Event, Inbox
from onceward.storage.database import Sql
from onceward.testing.telemetry import record
from tests.support.deadletters.world import BILLING, FIXED, LEASE, Letters, burial, contract, order
from tests.support.schema import new_schema

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────


REFUSED: list[tuple[Filter, dict[str, Any], str]] = [
    (Filter(event_type="order.paid"), {}, "name it in the filter"),
    (Filter(consumer="billing"), {}, "needs a filter in addition to the consumer"),
    (Filter(consumer="billing", status="open"), {}, "needs a filter in addition to the consumer"),
    (Filter(consumer="billing", older_than=0), {}, "needs a filter in addition to the consumer"),
    (Filter(consumer="billing", category="poison"), {}, "--poison-fixed"),
    (Filter(consumer="billing", text="x", status="resolved"), {}, "only open letters"),
    (BILLING, {"rca": None}, "needs an RCA"),
    (BILLING, {"rca": 77}, "there is no RCA 77"),
    (BILLING, {"rca": Rca(category="poison", root_cause="x", fix_ref="y")}, "--poison-fixed"),
    (BILLING, {"rate": 0}, "from 1 to 1000"),
    (BILLING, {"rate": 1001}, "from 1 to 1000"),
    (BILLING, {"rate": 0.5}, "from 1 to 1000"),
    (BILLING, {"rate": True}, "from 1 to 1000"),
    (BILLING, {"redrive_id": " "}, "plain text"),
    (Filter(consumer="billing", event_type="order.sent"), {}, "there are none"),
    (Filter(consumer="billing", event_type="killer"), {}, "1 poison; .* --poison-fixed"),
]


@pytest.mark.req("CC-052")
def test_a_redrive_is_refused_and_says_what_to_do(letters: Letters) -> None:
    letters.bury(burial(), burial("killer", event_type="killer", category=Category.POISON))
    for wanted, more, says in REFUSED:
        with pytest.raises(RedriveRefusedError, match=says):
            letters.send_again(wanted, **more)
    assert {letter.status for letter in letters.find()} == {Status.OPEN}
    assert (letters.rcas(), letters.redrives(), letters.audit()) == ([], [], [])


@pytest.mark.req("CC-052")
@pytest.mark.parametrize("field", ["root_cause", "fix_ref"])
@pytest.mark.parametrize("value", ["", "  ", None])
def test_an_rca_needs_a_root_cause_and_a_fix(field: str, value: Any) -> None:
    with pytest.raises(RedriveRefusedError, match=f"{field} is empty"):
        Rca(**{"category": "business", "root_cause": "a bug", "fix_ref": "v2", field: value})


@pytest.mark.req("CC-052")
def test_a_closed_rca_is_refused(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b", event_type="order.sent"))
    made = letters.send_again(BILLING)
    (redelivered,) = letters.deliver()
    assert letters.rcas()[0]["closed_at"] is None
    letters.settle(redelivered, "done")
    assert letters.rcas()[0]["closed_at"] is not None
    with pytest.raises(RedriveRefusedError, match="is closed"):
        letters.send_again(Filter(consumer="billing", event_type="order.sent"), rca=made.rca_id)


@pytest.mark.req("CC-052")
@pytest.mark.parametrize("query", [redrive_leases._IS_ANY_DUE, redrive_leases._DUE], ids=["any", "due"])
def test_a_fetch_reads_the_letters_of_a_redrive_up_to_now(postgres_url: str, query: str) -> None:
    """By the index. Each fetch would pass all letters that a redrive lets go later, otherwise."""
    with new_schema(postgres_url) as schema:
        engine = create_engine(schema.url, connect_args=schema.connect_args)
        Inbox(engine).migrate()
        with engine.connect() as connection:
            connection.exec_driver_sql("SET enable_seqscan = off")
            plan = Sql("postgresql").on(connection, f"EXPLAIN {query}", consumer="billing", size=10).scalars()
            (condition,) = [each for each in plan if "Index Cond" in each]
            assert "consumer" in condition
            assert "available_at <=" in condition
        engine.dispose()


def test_an_open_rca_serves_several_redrives(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b"))
    first = letters.send_again(Filter(consumer="billing", message_id="a"))
    second = letters.send_again(Filter(consumer="billing", message_id="b"), rca=first.rca_id)
    assert (second.rca_id, second.letters, len(letters.rcas())) == (first.rca_id, 1, 1)


def test_the_operator_has_a_name(letters: Letters) -> None:
    letters.bury(burial())
    with pytest.raises(ValueError, match="operator's name"):
        letters.send_again(operator=" ")


# ── once ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-052")
def test_a_second_click_is_harmless(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b"))
    first = letters.send_again(redrive_id="click")
    letters.bury(burial("c"))
    second = letters.again().send_again(redrive_id="click")
    assert (first.repeated, second.repeated, second.letters, second.rca_id) == (False, True, 2, first.rca_id)
    assert letters.one(message_id="c").status is Status.OPEN
    assert len(letters.redrives()) == len(letters.audit()) == len(letters.rcas()) == 1
    with pytest.raises(RedriveRefusedError, match="another filter"):
        letters.send_again(Filter(consumer="billing", message_id="c"), redrive_id="click")


@pytest.mark.without("asyncio")
def test_two_clicks_at_once_are_one_redrive(letters: Letters) -> None:
    letters.bury(*(burial(f"m{number}") for number in range(20)))
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: letters.send_again(redrive_id="click"), range(4)))
    assert sorted(each.repeated for each in made) == [False, True, True, True]
    assert {letter.redrives for letter in letters.find()} == {1}


def test_a_redrive_takes_a_bounded_number_and_says_what_is_left(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST == 10_000
    monkeypatch.setattr("onceward.deadletters.redrive.MOST", 3)
    letters.bury(*(burial(f"m{number}") for number in range(5)))
    made = letters.send_again()
    assert (made.letters, made.left) == (3, 2)


# ── order and pace ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-052")
def test_letters_of_an_aggregate_come_in_the_order_of_their_sequence(letters: Letters) -> None:
    numbered = [("x", 3), ("y", 2), ("x", 1), ("y", 1), ("x", 2)]
    letters.bury(*(burial(f"{of}{number}", aggregate_id=of, sequence=number) for of, number in numbered))
    letters.send_again()
    letters.advance(60)
    came = [redelivered.message_id for redelivered in letters.deliver()]
    assert [name for name in came if name[0] == "x"] == ["x1", "x2", "x3"]
    assert [name for name in came if name[0] == "y"] == ["y1", "y2"]


class Pace:
    """When each letter was delivered, by the virtual clock."""

    def __init__(self, letters: Letters) -> None:
        self.letters = letters
        self.at: list[float] = []
        self.ids: list[str] = []

    def poll(self, size: int = 1000) -> None:
        for redelivered in self.letters.deliver(size, lease=100_000.0):
            self.at.append(self.letters.clock())
            self.ids.append(redelivered.message_id)

    def most_in_a_minute(self) -> int:
        return max(sum(1 for each in self.at if 0 <= each - start <= 60) for start in set(self.at))


@pytest.mark.req("CC-052")
def test_a_hundred_a_minute_in_any_window_with_two_calls_and_a_restart(letters: Letters) -> None:
    letters.bury(*(burial(f"a{number}") for number in range(150)))
    letters.bury(*(burial(f"b{number}", event_type="order.sent") for number in range(100)))
    first = letters.send_again()
    second = letters.again().send_again(Filter(consumer="billing", event_type="order.sent"))
    assert second.first_at > first.last_at
    assert first.last_at - first.first_at == pytest.approx(149 * 0.6)
    pace = Pace(letters)
    for _ in range(50):
        pace.poll()
        letters.again()
        letters.advance(3.9)
    assert sorted(pace.ids) == sorted([f"a{n}" for n in range(150)] + [f"b{n}" for n in range(100)])
    assert 90 <= pace.most_in_a_minute() <= 100


@pytest.mark.req("CC-052")
def test_what_is_overdue_does_not_come_in_one_burst(letters: Letters) -> None:
    letters.bury(*(burial(f"m{number}") for number in range(60)))
    letters.send_again(rate=20)
    letters.advance(86400)
    pace = Pace(letters)
    for _ in range(30):
        pace.poll()
        letters.advance(7)
    assert len(set(pace.ids)) == len(pace.ids) == 60
    assert pace.most_in_a_minute() == 20


@pytest.mark.req("CC-052")
@pytest.mark.without("asyncio")
def test_a_thousand_of_one_type_and_two_workers_at_once(letters: Letters) -> None:
    letters.bury(*(burial(f"m{number}") for number in range(1000)))
    made = letters.send_again(rate=400)
    assert made.letters == 1000
    pace = Pace(letters)
    workers = 2
    with ThreadPoolExecutor(workers) as threads:
        for _ in range(100):
            list(threads.map(lambda _: pace.poll(30), range(workers)))
            letters.advance(3.0)
            if len(pace.ids) == 1000:
                break
    assert len(pace.ids) == len(set(pace.ids)) == 1000
    assert pace.most_in_a_minute() <= 400


def test_a_letter_that_is_handed_out_again_counts_again(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b"))
    letters.send_again(rate=1)
    (redelivered,) = letters.deliver()
    letters.settle(redelivered, "returned")
    assert letters.deliver() == []
    letters.advance(60.1)
    assert len(letters.deliver()) == 1


def test_one_that_was_given_back_for_long_does_not_hold_up_the_next_redrive(letters: Letters) -> None:
    letters.bury(burial("a"), burial("b"))
    letters.send_again(Filter(consumer="billing", message_id="a"))
    (redelivered,) = letters.deliver()
    letters.settle(redelivered, "returned", delay=80_000.0)
    made = letters.send_again(Filter(consumer="billing", message_id="b"))
    assert made.first_at < letters.clock() + 60


@pytest.mark.without("asyncio")
def test_two_workers_never_have_the_same_letter(letters: Letters) -> None:
    letters.bury(*(burial(f"m{number}") for number in range(200)))
    letters.send_again(rate=1000)
    letters.advance(60)
    with ThreadPoolExecutor(8) as threads:
        batches = list(threads.map(lambda _: letters.deliver(25), range(8)))
    got = [redelivered.id for redelivered in itertools.chain(*batches)]
    assert len(got) == len(set(got)) == 200


# ── followed up ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-052", "CC-050")
def test_one_that_dies_again_is_the_same_letter_and_opens_the_matter_again(
    letters: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    letters.bury(burial("a"), burial("b"))
    made = letters.send_again()
    letters.advance(60)
    first, second = letters.deliver()
    with record() as recording, caplog.at_level(logging.WARNING, "onceward.deadletters"):
        assert letters.settle(first, "done")
        assert letters.settle(second, "failed", category="BUSINESS", error="no such account")
        assert recording.metric("onceward.deadletters.redriven", outcome="succeeded") == 1
        assert recording.metric("onceward.deadletters.redriven", outcome="died_again") == 1
    assert "no such account" in caplog.text
    letter = letters.one(message_id="b")
    assert (letter.status, letter.deaths, letter.attempts, letter.redrives) == (Status.OPEN, 2, 2, 1)
    assert [each.error for each in letter.history] == ["no connection", "BUSINESS: no such account"]
    assert (letter.category, letter.rca_id, letter.redrive_id) == (Category.BUSINESS, made.rca_id, made.id)
    assert (letter.keep_until - letter.died_at).days == 90
    assert letters.one(message_id="a").status is Status.RESOLVED
    (rca,) = letters.rcas()
    assert (rca["closed_at"], rca["reopened"]) == (None, 1)
    (redrive,) = letters.redrives()
    assert [redrive[name] for name in ("letters", "waiting", "succeeded", "died_again")] == [2, 0, 1, 1]

    letters.send_again(rca=made.rca_id)
    letters.advance(60)
    letters.settle(*letters.deliver(), "done")
    assert letters.rcas()[0]["closed_at"] is not None
    assert [row["died_again"] for row in letters.redrives()] == [0, 1], "the outcome of the first stays known"


def test_a_resolved_letter_that_its_source_buries_anew_opens_the_matter_again(letters: Letters) -> None:
    letters.bury(burial())
    letters.send_again()
    letters.settle(*letters.deliver(), "done")
    assert letters.rcas()[0]["closed_at"] is not None
    letters.bury(burial(history=(Failure("2026-02-02T00:00:00+00:00", "once more", 1),)))
    letter = letters.one()
    assert (letter.status, letter.deaths, letter.settled_at) == (Status.OPEN, 2, None)
    assert (letters.rcas()[0]["closed_at"], letters.rcas()[0]["reopened"]) == (None, 1)


def test_discarding_the_last_letter_closes_the_matter(letters: Letters) -> None:
    letters.bury(burial())
    letters.send_again()
    letters.settle(*letters.deliver(), "failed")
    letters.discard(BILLING, reason="paid by hand", operator="ann")
    assert letters.rcas()[0]["closed_at"] is not None


@pytest.mark.req("CC-050", "CC-052")
def test_three_lost_deliveries_make_it_poison(letters: Letters, caplog: pytest.LogCaptureFixture) -> None:
    letters.bury(burial("killer"), burial("mate"))
    letters.send_again()
    letters.advance(1)
    assert [each.message_id for each in letters.deliver()] == ["killer", "mate"]
    mate = letters.core("deliver", "billing", 10, LEASE)
    assert mate == [], "they are leased"
    for _ in range(2):
        letters.advance(LEASE + 1)
        (suspect,) = letters.deliver()
        assert suspect.message_id == "killer", "a suspect comes alone"
        (second,) = letters.deliver()
        assert letters.settle(second, "returned")
    letters.advance(LEASE + 1)
    with record() as recording, caplog.at_level(logging.ERROR, "onceward.deadletters"):
        assert [each.message_id for each in letters.deliver()] == ["mate"]
        assert recording.metric("onceward.deadletters.redriven", outcome="poisoned") == 1
    assert "killer" in caplog.text
    letter = letters.one(message_id="killer")
    assert (letter.status, letter.category, letter.deaths) == (Status.OPEN, Category.POISON, 2)
    assert letter.attempts == len(letter.history) == 4
    assert letters.rcas()[0]["reopened"] == 1
    with pytest.raises(RedriveRefusedError, match="1 poison"):
        letters.send_again(Filter(consumer="billing", message_id="killer"))


def test_a_suspect_does_not_come_together_with_those_before_it(letters: Letters) -> None:
    letters.bury(burial("killer"), burial("mate"))
    letters.send_again()
    (killer,) = letters.deliver()
    letters.database.do("UPDATE onceward_dead_letters SET available_at = 0 WHERE message_id = 'mate'")
    letters.advance(LEASE + 1)
    assert [each.message_id for each in letters.deliver()] == ["mate"]
    assert [each.message_id for each in letters.deliver()] == [killer.message_id]


def test_an_outcome_that_comes_too_late_changes_nothing(letters: Letters) -> None:
    letters.bury(burial())
    letters.send_again()
    (late,) = letters.deliver()
    letters.advance(LEASE + 1)
    (current,) = letters.deliver()
    assert current.token == late.token + 1
    assert not letters.settle(late, "failed", error="too late")
    assert letters.core("extend", [late[:2], current[:2]], LEASE) == [late[:2]]
    assert letters.one().status is Status.REDRIVEN
    assert letters.settle(current, "done")
    assert not letters.settle(current, "done")
    assert letters.one().status is Status.RESOLVED


def test_an_extended_lease_keeps_others_away(letters: Letters) -> None:
    letters.bury(burial())
    letters.send_again()
    (redelivered,) = letters.deliver()
    for _ in range(4):
        letters.advance(LEASE * 0.7)
        assert letters.core("extend", [redelivered[:2]], LEASE) == []
        assert letters.deliver() == []
    assert letters.settle(redelivered, "done")


@pytest.mark.without("asyncio")
def test_rcas_close_when_the_last_two_letters_are_settled_at_once(letters: Letters) -> None:
    letters.bury(*(burial(f"m{number}") for number in range(16)))
    letters.send_again(rca=FIXED, rate=1000)
    letters.advance(60)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda redelivered: letters.settle(redelivered, "done"), letters.deliver()))
    assert letters.rcas()[0]["closed_at"] is not None
    assert letters.redrives()[0]["succeeded"] == 16


# ── poison, after a fix ─────────────────────────────────────────────────────────────────────────────────


CRASHED = Rca(category="poison", root_cause="a loop in the parser", fix_ref="v2")


@pytest.mark.req("CC-081")
def test_poison_is_redriven_after_a_fix_alone_and_counts_afresh(letters: Letters) -> None:
    inbox = letters.inbox(contract())
    killer = order("killer")
    letters.bury(
        burial_of(killer, consumer="billing", error="never ended", category="poison"),
        burial_of(order("o2"), consumer="billing", error=ConnectionError("down")),
    )
    with letters.database.session() as session:  # three crashes, as the inbox counted them
        columns = "consumer_id, tracking_id, event_day, starts, ends, last_at"
        day = Event.of(killer).day
        values = f"'billing', 'killer', {day}, 3, 0, 0"
        session.execute(f"INSERT INTO onceward_attempts ({columns}) VALUES ({values})")
    with pytest.raises(RedriveRefusedError, match="--poison-fixed"):
        letters.send_again(BILLING, rca=CRASHED)
    made = letters.send_again(BILLING, rca=CRASHED, poison_fixed=True)
    assert made.letters == 2
    assert letters.rcas()[0]["category"] == "poison"
    assert json.loads(letters.audit()[0]["details"])["poison"] == 1
    letters.advance(120)
    handled: list[str] = []
    source = letters.around(letters.queue())

    def handle(transaction: Any, session: Any) -> None:
        handled.append(transaction.id)

    letters.consume(source, handle, inbox=inbox, promised=contract())
    assert sorted(handled) == ["killer", "o2"]
    assert {letter.status for letter in letters.find()} == {Status.RESOLVED}


@pytest.mark.req("CC-081")
def test_redriven_poison_is_delivered_alone_and_is_poison_again_if_it_kills_again(letters: Letters) -> None:
    letters.bury(burial("a"), burial("killer", category=Category.POISON), burial("b"))
    letters.send_again(BILLING, rca=CRASHED, poison_fixed=True)
    letters.advance(120)
    (first,) = letters.deliver()
    assert first.message_id == "a", "what follows it is poison"
    letters.settle(first, "done")
    for _ in range(3):
        assert [each.message_id for each in letters.deliver(lease=1.0)] == ["killer"], "b waits"
        letters.advance(5)
    assert [each.message_id for each in letters.deliver()] == ["b"]
    killer = letters.one(message_id="killer")
    assert (killer.status, killer.category) == (Status.OPEN, Category.POISON)
    with pytest.raises(RedriveRefusedError, match=r"1 poison; poison seems to kill.*--poison-fixed"):
        letters.send_again(Filter(consumer="billing", message_id="killer"))
    again = letters.send_again(
        Filter(consumer="billing", message_id="killer"), rca=CRASHED, poison_fixed=True
    )
    assert again.letters == 1


@pytest.mark.req("CC-081")
def test_without_the_option_poison_stays_when_others_are_redriven(letters: Letters) -> None:
    letters.bury(burial("a"), burial("killer", category=Category.POISON))
    assert letters.send_again(BILLING).letters == 1
    assert letters.one(message_id="killer").status == Status.OPEN
