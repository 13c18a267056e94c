"""Schedules on real databases: one message for each slot, whichever process publishes it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event

from onceward.schedules.timetable import Timetable
from onceward.testing.clock import FakeClock
from tests.support.outbox import OutboxWorld, drain, outbox

__all__ = ["outbox"]

START = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC).timestamp()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


def timetable(outbox: OutboxWorld, clock: FakeClock) -> Timetable:
    app = outbox.app
    return Timetable(outbox.engine, app.name, app.schedules.values(), app.outbox, clock.now)


def every_minute(outbox: OutboxWorld, **given: Any) -> Any:
    @outbox.app.every("1m", **given)
    @outbox.app.consumer("memory://ticks", contract=None)
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
    @outbox.app.consumer("memory://ticks", contract=None)
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
    @outbox.app.producer("memory://reports")
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


@pytest.mark.req("SC-02")
def test_all_schedules_are_published_in_one_transaction(outbox: OutboxWorld, clock: FakeClock) -> None:
    for name in ("one", "two", "three"):

        def tick(slot: dict[str, str]) -> None: ...

        tick.__name__ = tick.__qualname__ = name
        outbox.app.every("1m")(outbox.app.consumer(f"memory://{name}", contract=None)(tick))
    timetable(outbox, clock).publish()
    clock.advance(60.0)
    commits: list[Any] = []
    event.listen(outbox.engine, "commit", commits.append)
    timetable(outbox, clock).publish()
    assert len(commits) == 1
    assert len(outbox.rows()) == 3
