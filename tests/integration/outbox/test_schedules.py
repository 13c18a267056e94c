"""Schedules on real databases: one message for each slot, whichever process publishes it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event, text

from onceward import Transaction
from onceward._time import move_ahead
from onceward.outbox import Delayed
from onceward.schedules.timetable import Timetable
from onceward.testing.clock import FakeClock
from tests.support.outbox import OutboxWorld, drain, outbox
from tests.support.wait import until

__all__ = ["outbox"]

START = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC).timestamp()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


def timetable(outbox: OutboxWorld, clock: FakeClock, *, in_place: bool = True, **given: Any) -> Timetable:
    app = outbox.app
    return Timetable(
        outbox.engine, app.name, app.schedules.values(), app.outbox, clock.now, in_place=in_place, **given
    )


def every_minute(outbox: OutboxWorld, **given: Any) -> Any:
    @outbox.app.every("1m", **given)
    @outbox.app.consumer("redis://x/ticks", contract=None)
    def tick(slot: dict[str, str]) -> None: ...

    return tick


@pytest.mark.req("SC-02")
def test_each_slot_is_one_message_with_an_id_of_its_own_and_a_new_schedule_begins_with_its_next_slot(
    outbox: OutboxWorld, clock: FakeClock
) -> None:
    began = datetime.now(UTC)
    every_minute(outbox)
    assert timetable(outbox, clock).publish() == pytest.approx(30.0, abs=1.0)
    assert outbox.rows() == []
    clock.advance(31.0)
    for _ in range(2):
        timetable(outbox, clock).publish()
    clock.advance(60.0)
    timetable(outbox, clock).publish()
    assert outbox.rows("message_id") == [
        "shop:tick@2026-03-01T12:01:00+00:00",
        "shop:tick@2026-03-01T12:02:00+00:00",
    ]
    relay = outbox.relay()
    drain(relay)
    [sink] = outbox.sinks.values()
    assert sink.payloads[0] == {"schedule": "tick", "slot": "2026-03-01T12:01:00+00:00"}
    assert sink.arrived[0].created_at >= began, "it is as old as its send, however late its slot is sent"


@pytest.mark.req("SC-02")
def test_many_processes_publish_a_slot_once(outbox: OutboxWorld, clock: FakeClock) -> None:
    every_minute(outbox, catch_up="all")
    timetable(outbox, clock).publish()
    clock.advance(600.0)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: timetable(outbox, clock).publish(), range(6)))
    assert len(outbox.rows()) == 10
    assert len(set(outbox.rows("message_id"))) == 10


@pytest.mark.req("SC-02")
def test_a_slot_is_published_once_even_after_its_message_was_purged(
    outbox: OutboxWorld, clock: FakeClock
) -> None:
    every_minute(outbox)
    timetable(outbox, clock).publish()
    clock.advance(31.0)
    timetable(outbox, clock).publish()
    drain(outbox.relay(retention=-1.0))
    assert outbox.rows() == []
    timetable(outbox, clock).publish()
    assert outbox.rows() == []


@pytest.mark.req("SC-03")
@pytest.mark.parametrize(("catch_up", "published"), [("last", 1), ("all", 3), ("none", 0)])
def test_what_passed_while_nothing_ran_is_made_up_for_as_the_schedule_says(
    outbox: OutboxWorld, clock: FakeClock, catch_up: Any, published: int
) -> None:
    @outbox.app.every("1h", catch_up=catch_up)
    @outbox.app.consumer("redis://x/ticks", contract=None)
    def tick(slot: dict[str, str]) -> None: ...

    timetable(outbox, clock).publish()
    clock.advance(3.5 * 3600)
    timetable(outbox, clock).publish()
    assert len(outbox.rows()) == published


@pytest.mark.req("SC-04")
def test_a_producer_that_fails_keeps_its_slot_and_holds_up_no_other(
    outbox: OutboxWorld, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    @outbox.app.every("1m")
    @outbox.app.producer("redis://x/reports")
    def report(slot: datetime) -> dict[str, str]:
        if broken:
            raise OSError("no report today")
        return {"at": slot.isoformat()}

    every_minute(outbox)
    timetable(outbox, clock).publish()
    clock.advance(31.0)
    timetable(outbox, clock).publish()
    assert outbox.rows("target") == ["consumer:tick"]
    assert "the schedule report has no message for its slot" in caplog.text
    assert "no report today" in caplog.text
    broken = False
    timetable(outbox, clock).publish()
    assert outbox.rows("target") == ["consumer:tick", "producer:report"]


@pytest.mark.req("SC-03", "SC-04")
@pytest.mark.parametrize("catch_up", ["last", "all", "none"])
def test_a_slot_that_failed_is_not_one_that_was_missed(
    outbox: OutboxWorld, clock: FakeClock, catch_up: Any
) -> None:
    tried = []

    @outbox.app.every("1h", catch_up=catch_up)
    @outbox.app.producer("redis://x/reports")
    def report(slot: datetime) -> str:
        tried.append(slot)
        if len(tried) < 4:
            raise OSError("not yet")
        return slot.isoformat()

    own = timetable(outbox, clock)
    own.publish()
    clock.advance(3570.0)
    for _ in range(5):
        own.publish()
        clock.advance(31.0)
        move_ahead(31.0)
    move_ahead(5 * -31.0)
    assert [f"{each:%H:%M}" for each in tried] == ["13:00"] * 4
    assert len(outbox.rows()) == 1


@pytest.mark.req("SC-04")
def test_a_producer_that_exits_has_failed(
    outbox: OutboxWorld, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    @outbox.app.every("1m")
    @outbox.app.producer("redis://x/reports")
    def report() -> None:
        raise SystemExit("from the producer")

    timetable(outbox, clock).publish()
    clock.advance(31.0)
    own = timetable(outbox, clock, in_place=False)
    own.publish()
    until(lambda: not own.is_calling)
    own.publish()
    assert "the schedule report has no message for its slot" in caplog.text
    assert "from the producer" in caplog.text


@pytest.mark.req("SC-07")
def test_a_producer_may_write_to_the_database_of_the_app(outbox: OutboxWorld, clock: FakeClock) -> None:
    with outbox.engine.begin() as connection:
        connection.execute(text("CREATE TABLE reports (slot TEXT)"))

    @outbox.app.every("1m", catch_up="all")
    @outbox.app.producer("redis://x/reports")
    def report(slot: datetime) -> str:
        with outbox.engine.begin() as own:
            own.execute(text("INSERT INTO reports (slot) VALUES (:slot)"), {"slot": slot.isoformat()})
        return slot.isoformat()

    timetable(outbox, clock).publish()
    clock.advance(180.0)
    timetable(outbox, clock).publish()
    assert len(outbox.rows()) == 3


@pytest.mark.req("SC-07")
def test_a_slow_producer_holds_up_nothing_and_is_called_once_at_a_time(
    outbox: OutboxWorld, clock: FakeClock
) -> None:
    begun, release = [], threading.Event()

    @outbox.app.every("1m")
    @outbox.app.producer("redis://x/reports")
    def report(slot: datetime) -> str:
        begun.append(slot)
        assert release.wait(60)
        return slot.isoformat()

    every_minute(outbox)
    timetable(outbox, clock).publish()
    clock.advance(31.0)
    rung = threading.Event()
    own = timetable(outbox, clock, in_place=False, on_made=rung.set)
    relay = outbox.relay(timetable=own)
    drain(relay)
    assert outbox.rows("target") == ["consumer:tick"]
    assert outbox.rows() == ["published"]
    until(lambda: len(begun) == 1)
    move_ahead(31.0)
    try:
        drain(relay)
    finally:
        move_ahead(-31.0)
    assert relay.is_calling
    assert len(begun) == 1
    release.set()
    assert rung.wait(60)
    assert (relay.is_making, relay.is_calling) == (True, False), "it is made, and not written yet"
    drain(relay)
    assert not relay.is_making
    assert outbox.sinks["producer:report"].payloads == [begun[0].isoformat()]


@pytest.mark.req("SC-02")
def test_a_drain_has_the_slots_that_are_due_when_it_begins(outbox: OutboxWorld, clock: FakeClock) -> None:
    every_minute(outbox, catch_up="all")
    timetable(outbox, clock).publish()
    clock.advance(61.0)
    relay = outbox.relay(timetable=timetable(outbox, clock))
    relay.draining = True
    drain(relay)
    clock.advance(60.0)
    move_ahead(60.0)
    try:
        drain(relay)
    finally:
        move_ahead(-60.0)
    assert outbox.rows() == ["published"]


@pytest.mark.req("SC-07")
def test_of_several_processes_that_make_the_message_of_a_slot_the_first_sends_it(
    outbox: OutboxWorld, clock: FakeClock
) -> None:
    calls = []
    release = threading.Event()

    @outbox.app.every("1m")
    @outbox.app.producer("redis://x/reports")
    def report() -> int:
        calls.append(None)
        own = len(calls)
        if own == 1:
            assert release.wait(60)
        return own

    timetable(outbox, clock).publish()
    clock.advance(31.0)
    late = timetable(outbox, clock, in_place=False)
    late.publish()
    until(lambda: len(calls) == 1)
    timetable(outbox, clock).publish()
    release.set()
    until(lambda: not late.is_calling)
    late.publish()
    drain(outbox.relay())
    assert outbox.sinks["producer:report"].payloads == [2]


@pytest.mark.req("SC-08")
def test_a_producer_may_return_what_app_produce_sends(outbox: OutboxWorld, clock: FakeClock) -> None:
    returned: list[Any] = [
        None,
        Transaction(payload=1, metadata={"event_type": "one"}, correlation_id="all"),
        Delayed(Transaction(payload=2, metadata={"event_type": "two"}), delay=3600, key="k"),
    ]

    @outbox.app.every("1m", catch_up="all")
    @outbox.app.producer("redis://x/reports")
    def report() -> Any:
        return returned.pop(0)

    timetable(outbox, clock).publish()
    clock.advance(180.0)
    timetable(outbox, clock).publish()
    assert returned == []
    drain(outbox.relay())
    assert outbox.rows() == ["published", "delayed"]
    assert outbox.rows("key") == [None, "k"]
    [sent] = outbox.sinks["producer:report"].arrived
    assert (sent.id, sent.payload) == ("shop:report@2026-03-01T12:02:00+00:00", 1)
    assert (dict(sent.metadata), sent.correlation_id) == ({"event_type": "one"}, "all")


@pytest.mark.req("SC-02")
def test_all_schedules_are_published_in_one_transaction(outbox: OutboxWorld, clock: FakeClock) -> None:
    for name in ("one", "two", "three"):

        def tick(slot: dict[str, str]) -> None: ...

        tick.__name__ = tick.__qualname__ = name
        outbox.app.every("1m")(outbox.app.consumer(f"redis://x/{name}", contract=None)(tick))
    timetable(outbox, clock).publish()
    clock.advance(60.0)
    commits: list[Any] = []
    event.listen(outbox.engine, "commit", commits.append)
    timetable(outbox, clock).publish()
    assert len(commits) == 1
    assert len(outbox.rows()) == 3
