"""When the slots of a schedule are, and which of those that were missed are sent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from onceward import Onceward
from onceward.errors import ConfigurationError
from onceward.inbox import Contract
from onceward.outbox import Delayed
from onceward.schedules import Schedule
from onceward.schedules.schedule import MOST_AT_ONCE, Slots, cron, every

START = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)


class Job(msgspec.Struct):
    number: int


def schedule(slots: Slots, catch_up: Any) -> Schedule:
    return Schedule(name="s", slots=slots, catch_up=catch_up, text="", target=print, payload=str, headers={})


@pytest.mark.req("SC-01")
@pytest.mark.parametrize(
    ("interval", "first"),
    [
        ("30s", "2026-03-01T12:01:00"),
        ("5m", "2026-03-01T12:05:00"),
        ("24h", "2026-03-02T00:00:00"),
        (timedelta(hours=6), "2026-03-01T18:00:00"),
    ],
)
def test_slots_of_an_interval_are_its_multiples_so_all_processes_agree(interval: Any, first: str) -> None:
    one, two = islice(every(interval)(START), 2)
    assert one.isoformat() == f"{first}+00:00"
    assert one == next(every(interval)(one - timedelta(microseconds=1)))
    assert two > one


@pytest.mark.req("SC-01")
def test_a_cron_expression_follows_its_time_zone_through_summer_time() -> None:
    nights = list(islice(cron("0 3 * * *", "Europe/Berlin")(datetime(2026, 3, 27, 12, tzinfo=UTC)), 3))
    assert [each.isoformat() for each in nights] == [
        "2026-03-28T02:00:00+00:00",
        "2026-03-29T01:00:00+00:00",
        "2026-03-30T01:00:00+00:00",
    ]


@pytest.mark.req("SC-01")
def test_an_hour_that_a_night_does_not_have_or_has_twice_makes_one_slot_a_night() -> None:
    for begin in (datetime(2026, 3, 27, 12, tzinfo=UTC), datetime(2026, 10, 23, 12, tzinfo=UTC)):
        nights = list(islice(cron("30 2 * * *", "Europe/Berlin")(begin), 4))
        assert len({each.date() for each in nights}) == 4


@pytest.mark.req("SC-06")
@pytest.mark.parametrize("catch_up", ["last", "all", "none"])
def test_the_second_pass_of_an_hour_that_exists_twice_repeats_no_slot(catch_up: str) -> None:
    slots = cron("30 2 * * *", "Europe/Berlin")
    sent = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    again = sent + timedelta(minutes=35)  # it is 2:05 for the second time
    nightly = schedule(slots, catch_up)
    assert nightly.due(sent, again) == ([], sent)
    assert nightly.next(again) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)
    assert nightly.due(again, again + timedelta(minutes=30)) == ([], again), "a schedule that began at 2:05"


@pytest.mark.req("SC-03")
@pytest.mark.parametrize(
    ("catch_up", "late", "published"),
    [
        ("last", 3.2, ["12:03"]),
        ("all", 3.2, ["12:01", "12:02", "12:03"]),
        ("none", 3.2, ["12:03"]),
        ("last", 0.2, []),
    ],
)
def test_of_slots_that_passed_the_last_all_or_none_are_published(
    catch_up: str, late: float, published: list[str]
) -> None:
    slots, _ = schedule(every("1m"), catch_up).due(START, START + timedelta(minutes=late))
    assert [f"{each:%H:%M}" for each in slots] == published


@pytest.mark.req("SC-03")
def test_with_none_a_slot_that_was_missed_is_passed_over_and_the_next_one_is_not() -> None:
    hourly = schedule(every("1h"), "none")
    slots, last = hourly.due(START, START + timedelta(hours=2, minutes=30))
    assert (slots, f"{last:%H:%M}") == ([], "14:00")
    slots, _ = hourly.due(last, datetime(2026, 3, 1, 15, 0, 5, tzinfo=UTC))
    assert [f"{each:%H:%M}" for each in slots] == ["15:00"]


@pytest.mark.req("SC-03")
def test_a_year_of_missed_seconds_costs_no_year_to_count() -> None:
    made = 0

    def slots(after: datetime) -> Any:
        nonlocal made
        for each in every("1s")(after):
            made += 1
            yield each

    now = START + timedelta(days=365)
    assert schedule(slots, "last").due(START, now) == ([now], now)
    assert made < 100
    first, last = schedule(every("1s"), "all").due(START, now)
    assert len(first) == MOST_AT_ONCE
    assert last == first[-1] == START + timedelta(seconds=MOST_AT_ONCE)


def contract(*types: str) -> Contract:
    return Contract(consumer_id="c", event_types=types, owner_team="t", idempotency_mechanism="a row each")


def test_a_consumer_gets_the_event_type_of_its_contract() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")

    @app.every("5m")
    @app.consumer("memory://jobs", contract=contract("tick"))
    def tick(slot: dict[str, str], session: Any) -> None: ...

    assert app.schedules["tick"].headers == {"event_type": "tick"}
    assert app.schedules["tick"].payload(START) == {"schedule": "tick", "slot": START.isoformat()}


def _nothing(app: Onceward) -> Any:
    return lambda function: function


@pytest.mark.req("SC-05")
@pytest.mark.parametrize(
    ("decorator", "problem"),
    [
        (lambda app: app.every("5 minutes"), "'5 minutes' is not an interval of whole seconds; write '30s'"),
        (lambda app: app.every("0s"), "is not an interval"),
        (lambda app: app.every(timedelta(milliseconds=5)), "is not an interval"),
        (lambda app: app.every(300), "300 is not an interval"),
        (lambda app: app.cron("at three"), "'at three' is not a cron expression"),
        (lambda app: app.cron("61 * * * *"), "is not a cron expression .*; write five fields"),
        (lambda app: app.cron(None), r"None is not a cron expression \(it is of type NoneType\)"),
        (lambda app: app.every("5m", payload={"when": object()}), "its payload cannot be encoded"),
        (lambda app: app.cron("0 3 * * *", tz="Berlin"), "there is no time zone 'Berlin'"),
        (
            lambda app: app.cron("0 3 * * *", tz=ZoneInfo("Europe/Berlin")),
            "tz must be the name of a time zone, such as 'Europe/Berlin', not a ZoneInfo",
        ),
        (lambda app: app.cron("0 3 * * *", tz=UTC), "tz must be the name .*, not a timezone"),
        (lambda app: app.every("5m", catch_up="some"), "catch_up must be 'last', 'all' or 'none'"),
    ],
)
def test_bad_values_are_refused_at_the_decoration(decorator: Any, problem: str) -> None:
    app = Onceward("shop", database="sqlite:///shop.db")
    consumer = app.consumer("memory://jobs", contract=None)
    with pytest.raises(ConfigurationError, match=rf"the schedule 'tick' \(.*\): .*{problem}"):

        @decorator(app)
        @consumer
        def tick(slot: dict[str, str]) -> None: ...

    assert app.schedules == {}


@pytest.mark.req("SC-05")
def test_what_cannot_be_scheduled_is_refused() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")
    with pytest.raises(
        ConfigurationError, match=r"neither a consumer nor a producer.*put the schedule above"
    ):
        app.every("5m")(print)
    for decorator in (app.every, app.cron):
        with pytest.raises(ConfigurationError, match=r"needs its times: write @app\.\w+\(.*\) above"):
            decorator(print)  # type: ignore[arg-type]

    @app.producer("memory://jobs")
    def many() -> Any:
        yield 1

    with pytest.raises(ConfigurationError, match="a plain `def` that returns one payload"):
        app.every("5m")(many)

    @app.consumer("memory://jobs", contract=contract("a", "b"))
    def both(slot: dict[str, str], session: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="several event types, a, b"):
        app.every("5m")(both)

    @app.producer("memory://others")
    def one() -> int:
        return 1

    app.every("5m")(one)
    with pytest.raises(ConfigurationError, match="two schedules 'one'"):
        app.cron("* * * * *")(one)
    app.cron("* * * * *", name="one-by-cron")(one)
    with pytest.raises(ConfigurationError, match="recorded in the app's database"):
        Onceward("bare").every("5m")(one)


@pytest.mark.req("SC-05")
@pytest.mark.parametrize("name", [5, "", "a\0b", "\ud800", "n" * 201, ["a"]])
def test_a_name_that_no_id_can_have_is_refused(name: Any) -> None:
    app = Onceward("shop", database="sqlite:///shop.db")

    @app.producer("memory://jobs")
    def one() -> int:
        return 1

    with pytest.raises(ConfigurationError, match="name must be a text of 1 to 200 printable characters"):
        app.every("5m", name=name)(one)
    app.every("5m", name="n" * 200)(one)


@pytest.mark.req("SC-05")
def test_an_app_whose_name_leaves_no_room_for_ids_has_no_schedules() -> None:
    app = Onceward("a" * 390, database="sqlite:///shop.db")

    @app.producer("memory://jobs")
    def one() -> int:
        return 1

    with pytest.raises(ConfigurationError, match="begin with the name of the app, which is too long"):
        app.every("5m")(one)


@pytest.mark.req("SC-05")
def test_a_producer_takes_nothing_or_the_slot_in_whatever_way() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")
    now = datetime.now(UTC)

    def none() -> str:
        return "none"

    def by_position(slot: datetime, /) -> datetime:
        return slot

    def by_name(*, slot: datetime) -> datetime:
        return slot

    def anything(*args: Any, **more: Any) -> None: ...

    def several(slot: datetime, more: Any) -> None: ...

    for each, made in ((none, "none"), (by_position, now), (by_name, now)):
        app.every("5m")(app.producer("memory://jobs")(each))
        assert app.schedules[each.__name__].payload(now) == made
    for refused, parameters in ((anything, r"\*args, \*\*more"), (several, "slot, more")):
        with pytest.raises(
            ConfigurationError, match=f"its parameters are {parameters}; .* or one for the slot"
        ):
            app.every("5m")(app.producer("memory://jobs")(refused))


@pytest.mark.req("SC-05")
def test_a_payload_that_its_consumer_cannot_take_is_refused() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")

    @app.consumer("memory://jobs", contract=None)
    def work(job: Job) -> None: ...

    for given in ({}, {"payload": {"number": "one"}}):
        with pytest.raises(ConfigurationError, match="its payload is not what work takes"):
            app.every("5m", **given)(work)
    with pytest.raises(ConfigurationError, match="a Delayed is what a producer returns"):
        app.every("5m", payload=Delayed(1, delay=1))(work)
    app.every("5m", payload={"number": 1})(work)
    app.every("5m", payload=lambda slot: {"number": slot.minute}, name="by-code")(work)
