"""A purge removes what is past its retention, and nothing else, while consumers run; whatever dies in the meantime."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from onceward.errors import ConfigurationError
from onceward.inbox import (
    AsyncInbox,
    Breach,
    Contract,
    ContractError,
    Event,
    Handling,
    Inbox,
    PurgeReport,
    UnregisteredConsumerError,
)
from onceward.inbox.purge import steps
from onceward.inbox.purge.purge import PurgeInProgressError
from onceward.inbox.purge.steps import Pace
from onceward.inbox.stores import partitions, postgresql
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.partitions import PartitionState
from onceward.inbox.stores.sqlite import SqliteStore
from tests.support.inbox.ids import uuid7_of
from tests.support.wait import retry, until

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

PURGER = Path(__file__).with_name("purger.py")
PATIENCE = 240.0
OLD = 200
"""Days, far beyond the 90 that records are kept here."""


def contract(consumer_id: str = "billing", **changes: Any) -> Contract:
    fields = {
        "consumer_id": consumer_id,
        "event_types": ["*"],
        "owner_team": "money",
        "idempotency_mechanism": "dedup record and invoice in one transaction",
    }
    return Contract(**{**fields, **changes})


def event(name: str, days_ago: int, created_days_ago: int | None = None) -> Event:
    """An event whose id contains its day."""
    created_at = datetime.now(UTC) - timedelta(
        days=days_ago if created_days_ago is None else created_days_ago
    )
    return Event(
        tracking_id=id_of(name, days_ago), event_type="paid", created_at=created_at, payload={"id": name}
    )


def plain_event(tracking_id: str, days_ago: float) -> Event:
    """An event whose id contains no day."""
    created_at = datetime.now(UTC) - timedelta(days=days_ago)
    return Event(
        tracking_id=tracking_id, event_type="paid", created_at=created_at, payload={"id": tracking_id}
    )


def day_of(days_ago: int) -> int:
    return plain_event("x", days_ago).day


def id_of(name: str, days_ago: int) -> str:
    return uuid7_of(day_of(days_ago), name)


def seeded(day: int, number: object, prefix: str = "seed") -> str:
    """The id of a row of `PurgedInbox.seed`."""
    return f"{uuid7_of(day, prefix)[:24]}{number:0>12}"


class PurgedInbox:
    """An inbox under test, and a second view of its database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.inbox: Any = (AsyncInbox if database.asynchronous else Inbox)(database.default)
        self.observer: Engine = create_engine(database.url, connect_args=database.connect_args)
        self.beside = Inbox(self.observer)
        self.handled: list[str] = []
        self.beside.migrate()
        self.beside.register(contract())

    def call(self, method: str, *args: Any, **more: Any) -> Any:
        result = getattr(self.inbox, method)(*args, **more)
        return self.database.run(result) if self.database.asynchronous else result

    def process(self, given: Event, by: Contract | None = None) -> Handling:
        """Through another inbox than the one that purges: in production, another process has the events."""
        return self.beside.process(by or contract(), given, self._handle).handling

    def _handle(self, given: Event, session: Any) -> None:
        self.handled.append(given.payload["id"])

    def refused(self, given: Event, by: Contract | None = None) -> Breach:
        before = list(self.handled)
        with pytest.raises(ContractError) as caught:
            self.process(given, by)
        assert self.handled == before, "a refused event does not run"
        return caught.value.kind

    def purge(
        self, consumer_id: str | None = None, progress: Callable[[PurgeReport], None] = lambda _: None
    ) -> PurgeReport:
        result = self.inbox.purge(consumer_id, progress=progress)
        report: PurgeReport = self.database.run(result) if self.database.asynchronous else result
        return report

    def seed(self, consumer_id: str, day: int, count: int, prefix: str = "seed") -> None:
        """Rows as this many events would leave them, a thousand times faster."""
        head = seeded(day, "", prefix)[:24]
        if self.database.is_sqlite:
            series = "WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :count)"
            self.execute(
                "INSERT INTO onceward_dedup "
                f"(own_day, keep_day, consumer_id, tracking_id, payload_sha256, processed_at) {series} "
                f"SELECT {day}, {day}, '{consumer_id}', '{head}' || printf('%012d', n), zeroblob(32), 0 FROM s",
                count=count,
            )
            return
        with self.observer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            partitions.make(connection, day)
        self.execute(
            "INSERT INTO onceward_dedup (event_day, consumer_id, tracking_id, payload_sha256) "
            f"SELECT {day}, '{consumer_id}', '{head}' || lpad(n::text, 12, '0'), ''::bytea "
            "FROM generate_series(1, :count) AS s (n)",
            count=count,
        )

    def seed_plain(self, consumer_id: str, done_at: float, count: int, own_day: int) -> None:
        """The same for events whose ids contain no day: they were done at that time, one each microsecond."""
        if self.database.is_sqlite:
            columns = "own_day, keep_day, consumer_id, tracking_id, payload_sha256, processed_at"
            series = "WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :count)"
            keep_day = max(own_day, int(done_at // 86_400))
            rows = f"{own_day}, {keep_day}, '{consumer_id}', 'plain-' || n, zeroblob(32), {done_at} + n / 1e6 FROM s"
        else:
            columns, series = "own_day, event_day, consumer_id, tracking_id, payload_sha256, processed_at", ""
            rows = (
                f"{own_day}, -1, '{consumer_id}', 'plain-' || n, '', to_timestamp({done_at} + n / 10 / 1e5) "
            )
            rows += "FROM generate_series(1, :count) AS s (n)"
        self.execute(f"INSERT INTO onceward_dedup ({columns}) {series} SELECT {rows}", count=count)

    def execute(self, sql: str, **values: Any) -> None:
        with self.observer.begin() as connection:
            connection.execute(text(sql), values)

    def scalar(self, sql: str) -> Any:
        with self.observer.connect() as connection:
            return connection.scalar(text(sql))

    def rows(self, consumer_id: str = "billing") -> int:
        return int(self.scalar(f"SELECT count(*) FROM onceward_dedup WHERE consumer_id = '{consumer_id}'"))

    def horizon(self, consumer_id: str = "billing") -> int | None:
        found: int | None = self.scalar(
            f"SELECT floor_day FROM onceward_horizons WHERE consumer_id = '{consumer_id}'"
        )
        return found

    def partitions(self) -> dict[int, PartitionState]:
        with self.observer.connect() as connection:
            return {each.day: each.state for each in partitions.partitions(connection)}

    def purger(self, place: str) -> subprocess.Popen[bytes]:
        options = json.dumps(self.database.connect_args)
        return subprocess.Popen([sys.executable, str(PURGER), place, self.database.url, options])


@pytest.fixture
def site(database: Database) -> Iterator[PurgedInbox]:
    yield from _site(database)


@pytest.fixture
def on_sqlite(sqlite: Database) -> Iterator[PurgedInbox]:
    yield from _site(sqlite)


@pytest.fixture
def on_postgresql(postgresql: Database) -> Iterator[PurgedInbox]:
    yield from _site(postgresql)


@pytest.fixture(autouse=True)
def _own_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each day has the partition that it got when it was today."""
    monkeypatch.setattr(postgresql, "OWN_DAYS", (400, 400))


def _site(database: Database) -> Iterator[PurgedInbox]:
    made = PurgedInbox(database)
    yield made
    made.observer.dispose()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "LOCK_WAIT", 0.3)
    monkeypatch.setattr(partitions, "SNAPSHOT_WAIT", 0.3)


# ── what is purged, and what stays ──────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-011b")
def test_what_is_past_its_retention_goes_and_its_events_are_refused(site: PurgedInbox) -> None:
    for tracking_id, days_ago in [("new", 0), ("inside", 88), ("old", OLD), ("older", OLD + 1)]:
        assert site.process(event(tracking_id, days_ago)) is Handling.DONE
    report = site.call("purge")
    assert report.rows == 2
    assert report.floors == {"billing": (date(1970, 1, 1) + timedelta(days=site.horizon() or 0)).isoformat()}
    assert report.unfinished == []
    assert site.rows() == 2
    assert site.refused(event("old", OLD)) is Breach.TOO_OLD
    assert site.refused(event("never seen", OLD + 30)) is Breach.TOO_OLD
    assert site.process(event("inside", 88)) is Handling.DUPLICATE
    assert site.process(event("new", 0)) is Handling.DUPLICATE
    assert site.handled == ["new", "inside", "old", "older"]


@pytest.mark.req("CC-011b")
def test_not_a_day_inside_the_floor_goes(site: PurgedInbox) -> None:
    site.purge()
    floor = site.horizon()
    assert floor is not None
    assert floor in (day_of(90), day_of(90) - 1), "90 days before today, on either side of midnight"
    for day in (floor - 1, floor, floor + 1):
        site.seed("billing", day, 3, prefix=f"day{day}")
    report = site.purge()
    assert (report.rows, site.rows()) == (3, 6)
    assert site.beside.stats()[0]["oldest_day"] == floor


@pytest.mark.req("CC-011")
def test_retention_is_each_consumers_own(site: PurgedInbox) -> None:
    longer = contract("archive", dedup_days=400)
    site.beside.register(longer)
    for consumer_id in ("billing", "archive", "nobody"):
        site.seed(consumer_id, day_of(OLD), 5)
    assert site.purge().rows == 5
    assert [site.rows(each) for each in ("billing", "archive", "nobody")] == [0, 5, 5]
    assert site.process(event("late", OLD), longer) is Handling.DONE
    assert site.refused(event("late", OLD)) is Breach.TOO_OLD


@pytest.mark.req("CC-011")
def test_half_a_day_of_retention_keeps_the_whole_day(site: PurgedInbox) -> None:
    site.beside.register(contract("half", dedup_days=99.5))
    report = site.purge("half")
    floor = date.fromisoformat(report.floors["half"])
    assert date.today() - timedelta(days=102) < floor < date.today() - timedelta(days=98)
    assert site.horizon("half") in (day_of(100), day_of(100) - 1)


@pytest.mark.req("CC-011")
def test_legal_hold_lasts_until_it_is_registered_with_another_class(site: PurgedInbox) -> None:
    held = contract(retention="legal-hold")
    site.beside.register(held)
    site.process(event("old", OLD), held)
    report = site.purge()
    assert (report.rows, report.floors) == (0, {})
    assert "legal-hold" in report.skipped["billing"]
    assert site.horizon() is None
    assert site.process(event("old", OLD), held) is Handling.DUPLICATE
    site.beside.register(contract())
    assert site.purge().rows == 1
    assert site.refused(event("old", OLD)) is Breach.TOO_OLD


@pytest.mark.req("CC-011")
def test_a_registered_contract_below_the_floor_purges_nothing(site: PurgedInbox) -> None:
    with pytest.raises(ConfigurationError, match="between day 30 and day 90 a redriven dead letter"):
        contract(dedup_days=30)
    site.process(event("old", OLD))
    row = contract().as_row() | {"dedup_days": 30}
    site.execute("UPDATE onceward_consumers SET contract = :row", row=json.dumps(row))
    report = site.purge()
    assert "between day 30 and day 90" in report.skipped["billing"]
    assert (site.rows(), site.horizon()) == (1, None)


@pytest.mark.req("CC-011b")
def test_a_held_event_stays_a_duplicate_until_it_is_released(site: PurgedInbox) -> None:
    site.process(event("held", OLD))
    site.process(event("free", OLD))
    assert site.call("hold", "billing", id_of("held", OLD), reason="case 7", operator="anna")
    report = site.purge()
    assert report.rows == 1
    assert site.process(event("held", OLD)) is Handling.DUPLICATE
    assert site.refused(event("free", OLD)) is Breach.TOO_OLD
    assert site.purge().rows == 0, "the next purge does not take it either"
    assert site.process(event("held", OLD)) is Handling.DUPLICATE
    assert site.beside.stats()[0]["dedup_rows"] == 1
    assert site.call("release", "billing", id_of("held", OLD), reason="closed", operator="anna")
    assert site.purge().rows == 1
    assert site.refused(event("held", OLD)) is Breach.TOO_OLD
    assert site.handled == ["held", "free"]


@pytest.mark.req("CC-011b")
def test_a_consumer_on_hold_keeps_everything(site: PurgedInbox) -> None:
    site.beside.register(contract("other"))
    site.seed("billing", day_of(OLD), 3)
    site.seed("other", day_of(OLD), 3)
    site.call("hold", "billing", None, reason="audit", operator="anna")
    report = site.purge()
    assert report.skipped == {"billing": "it is on hold"}
    assert (site.rows("billing"), site.rows("other")) == (3, 0)
    assert site.horizon() is None
    site.call("release", "billing", reason="closed", operator="anna")
    assert site.purge().rows == 3


@pytest.mark.req("CC-011b")
def test_the_horizon_is_raised_and_committed_before_anything_goes(
    site: PurgedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.beside.register(contract("archive", retention="legal-hold"))
    site.seed("billing", day_of(OLD), 10)
    site.seed("archive", day_of(OLD), 10)  # so PostgreSQL removes rows here
    site.seed("billing", day_of(OLD + 1), 10)  # and drops a whole day here
    seen: list[int | None] = []

    def looking(function: Any) -> Any:
        def look_first(*args: Any, **more: Any) -> Any:
            seen.append(site.horizon())  # through another connection
            return function(*args, **more)

        return look_first

    monkeypatch.setattr(Store, "purge_step", looking(Store.purge_step))
    monkeypatch.setattr(Store, "purge_oldest_step", looking(Store.purge_oldest_step))
    monkeypatch.setattr(partitions, "detach", looking(partitions.detach))
    assert site.purge().rows == 20
    assert seen
    assert set(seen) <= {day_of(90), day_of(90) - 1}


@pytest.mark.req("CC-053", "CC-011b")
def test_an_id_without_a_day_is_remembered_from_when_it_was_done(site: PurgedInbox) -> None:
    """A copy may come with a newer created_at, so the event's own day does not say when to forget it."""
    assert site.process(plain_event("late", 80)) is Handling.DONE
    assert site.process(plain_event("very late", OLD)) is Handling.DONE
    site.purge()
    assert site.rows() == 2
    for days_ago in (0, 80, OLD):
        assert site.process(plain_event("late", days_ago)) is Handling.DUPLICATE
        assert site.process(plain_event("very late", days_ago)) is Handling.DUPLICATE
    assert site.refused(plain_event("never seen", OLD)) is Breach.TOO_OLD
    assert site.process(plain_event("new", 80)) is Handling.DONE


@pytest.mark.req("CC-053", "CC-011b")
def test_ids_without_a_day_go_when_their_retention_is_over_in_bounded_steps(site: PurgedInbox) -> None:
    old, recent = time.time() - OLD * 86_400, time.time() - 80 * 86_400
    site.beside.register(contract("archive", retention="legal-hold"))
    site.seed_plain("billing", old, 3_000, day_of(OLD))
    site.seed_plain("archive", old, 10, day_of(OLD))
    site.seed_plain("mail", old, 10, day_of(OLD))
    site.beside.register(contract("mail"))
    site.execute("UPDATE onceward_dedup SET tracking_id = 'r' || tracking_id WHERE consumer_id = 'mail'")
    site.seed_plain("mail", recent, 10, day_of(OLD))
    site.call("hold", "billing", "plain-1500", reason="case 7", operator="anna")
    report = site.purge()
    assert (report.rows, report.unfinished) == (3_009, [])
    assert report.steps >= 3
    assert (site.rows("billing"), site.rows("archive"), site.rows("mail")) == (1, 10, 10)
    assert site.process(event("any", 0)) is Handling.DONE
    assert site.purge().rows == 0
    site.call("release", "billing", "plain-1500", reason="closed", operator="anna")
    assert site.purge().rows == 1


@pytest.mark.req("CC-053")
def test_an_own_time_in_the_future_keeps_the_record_until_then(site: PurgedInbox) -> None:
    site.seed_plain("billing", time.time() - OLD * 86_400, 10, day_of(-OLD))
    assert site.purge().rows == 0
    assert site.rows() == 10


@pytest.mark.req("CC-053")
def test_the_result_of_an_effect_outlives_the_own_day_of_an_event_that_still_runs(site: PurgedInbox) -> None:
    """It was produced long ago, its effect was made yesterday, and its copy has a new created_at."""
    effectful = contract("effects", mode="effectful")
    site.beside.register(effectful)
    keys: list[str] = []

    def charge(given: Event, session: Any) -> None:
        session.effect("charge", keys.append)
        if len(site.handled) < 1:
            site.handled.append("failed")
            raise RuntimeError("after the charge")

    with pytest.raises(RuntimeError, match="after the charge"):
        site.beside.process(effectful, plain_event("late", OLD), charge)
    assert site.purge().effects == 0
    assert site.beside.process(effectful, plain_event("late", 0), charge).handling is Handling.DONE
    assert len(keys) == 1


def test_the_horizon_never_falls(site: PurgedInbox) -> None:
    site.purge()
    before = site.horizon()
    site.beside.register(contract(dedup_days=400))
    site.purge()
    assert site.horizon() == before


def test_the_ledgers_go_with_their_days_except_for_what_is_open(site: PurgedInbox) -> None:
    old, new = day_of(OLD), day_of(1)
    for tracking_id, day, locked in [
        ("old", old, "NULL"),
        ("ran out", old, "1"),
        ("in flight", old, str(time.time() + 3600)),
        ("new", new, "NULL"),
    ]:
        site.execute(
            "INSERT INTO onceward_attempts (consumer_id, tracking_id, event_day, starts, ends, locked_until, last_at) "
            f"VALUES ('billing', '{tracking_id}', {day}, 2, 1, {locked}, 0)"
        )
    for tracking_id, name, day, state in [
        ("old", "charge", old, "done"),
        ("old", "mail", old, "intended"),
        ("new", "charge", new, "done"),
        ("held", "charge", old, "done"),
    ]:
        site.execute(
            "INSERT INTO onceward_effects (consumer_id, tracking_id, name, event_day, effect_key, lock_token, state, "
            f"intended_at) VALUES ('billing', '{tracking_id}', '{name}', {day}, 'k', 1, '{state}', 0)"
        )
    site.call("hold", "billing", "held", reason="case 7", operator="anna")
    report = site.purge()
    assert (report.attempts, report.effects) == (2, 1)
    with site.observer.connect() as connection:
        assert set(connection.scalars(text("SELECT tracking_id FROM onceward_attempts"))) == {
            "in flight",
            "new",
        }
    left = {(row["tracking_id"], row["name"]) for row in site.call("effects", in_doubt=False)}
    assert left == {("old", "mail"), ("new", "charge"), ("held", "charge")}


def test_one_consumer_can_be_named(site: PurgedInbox) -> None:
    site.beside.register(contract("other"))
    for consumer_id in ("billing", "other"):
        site.seed(consumer_id, day_of(OLD), 5)
    report = site.call("purge", "other")
    assert (report.rows, list(report.floors)) == (5, ["other"])
    assert (site.rows("billing"), site.rows("other"), site.horizon()) == (5, 0, None)
    with pytest.raises(
        UnregisteredConsumerError, match="'typo' is not registered \\(registered: billing, other\\)"
    ):
        site.call("purge", "typo")


def test_stats_tell_of_everybody_who_has_rows(site: PurgedInbox) -> None:
    site.seed("billing", day_of(OLD), 3)
    site.seed("billing", day_of(1), 2)
    site.seed("gone", day_of(OLD), 4)
    site.call("hold", "billing", seeded(day_of(OLD), 1), reason="case 7", operator="anna")
    site.purge()
    billing, gone = site.call("stats")
    assert billing == {
        "consumer_id": "billing",
        "registered": True,
        "dedup_rows": 3,
        "oldest_day": day_of(OLD),
        "unended": 0,
        "effects_in_doubt": 0,
        "parked": 0,
        "floor_day": site.horizon(),
        "holds": 1,
    }
    assert (gone["consumer_id"], gone["registered"], gone["dedup_rows"]) == ("gone", False, 4)


# ── in bounded steps, while consumers run ───────────────────────────────────────────────────────────────


@pytest.mark.req("CC-011b")
def test_many_rows_go_in_bounded_steps_and_consumers_go_on_between_them(
    site: PurgedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.beside.register(contract("archive", retention="legal-hold"))
    site.seed("archive", day_of(OLD), 1)  # so PostgreSQL cannot drop the day
    site.seed("billing", day_of(OLD), 50_000)
    sizes: list[int] = []
    method = "purge_oldest_step" if site.database.is_sqlite else "purge_step"
    purge_step = getattr(Store, method)

    def watched(store: Store, connection: Any, **more: Any) -> Any:
        step = purge_step(store, connection, **more)
        sizes.append(step.rows)
        if not site.database.is_sqlite and len(sizes) == 3:  # in the middle of a step; SQLite has one writer
            assert site.process(event("in a step", 0)) is Handling.DONE
        return step

    monkeypatch.setattr(Store, method, watched)

    def consume(report: PurgeReport) -> None:
        assert site.process(event(f"at {len(site.handled)}", 0)) is Handling.DONE

    report = site.purge(progress=consume)
    assert report.rows == 50_000
    assert site.rows("archive") == 1
    assert report.steps >= 10
    assert max(sizes) <= steps.LARGEST_STEP
    assert 0 < report.longest_step < PATIENCE
    assert len(site.handled) >= report.steps


@pytest.mark.req("CC-011b")
def test_a_hold_that_is_placed_while_a_purge_runs_counts_from_then_on(site: PurgedInbox) -> None:
    site.beside.register(contract("archive", retention="legal-hold"))
    site.seed("archive", day_of(OLD), 1)
    site.seed("billing", day_of(OLD), 2_000)

    def hold(report: PurgeReport) -> None:
        if report.steps == 1:
            site.beside.hold("billing", seeded(day_of(OLD), 2000), reason="case 7", operator="anna")

    assert site.purge(progress=hold).rows == 1_999
    left = site.scalar("SELECT tracking_id FROM onceward_dedup WHERE consumer_id = 'billing'")
    assert left == seeded(day_of(OLD), 2000)


@pytest.mark.req("CC-011b")
@pytest.mark.parametrize("change", ["hold", "legal-hold", "unregister"])
def test_a_consumer_that_is_held_while_a_purge_runs_keeps_the_rest(site: PurgedInbox, change: str) -> None:
    site.beside.register(contract("archive", retention="legal-hold"))
    site.seed("archive", day_of(OLD), 1)
    site.seed("billing", day_of(OLD), 2_000)

    def hold(report: PurgeReport) -> None:
        if report.steps != 1:
            return
        if change == "hold":
            site.beside.hold("billing", None, reason="audit", operator="anna")
        elif change == "unregister":
            site.beside.unregister("billing")
        else:
            site.beside.register(contract(retention="legal-hold"))

    report = site.purge(progress=hold)
    assert 0 < report.rows < 2_000
    assert report.rows + site.rows() == 2_000
    assert "during the purge" in report.skipped["billing"]


def test_the_size_of_a_step_follows_the_time_it_takes() -> None:
    pace = Pace()
    for _ in range(20):
        pace.learn(0.000_1, is_full=True)
    assert pace.size == steps.LARGEST_STEP
    pace.learn(steps.STEP_SECONDS * 10, is_full=True)
    assert pace.size == steps.LARGEST_STEP // 10
    before = pace.size
    pace.learn(0.000_1, is_full=False)
    assert pace.size == before, "a short stretch says nothing about long ones"
    for _ in range(20):
        pace.learn(1.0, is_full=False)
    assert pace.size == steps.SMALLEST_STEP


# ── SQLite ──────────────────────────────────────────────────────────────────────────────────────────────


def test_two_purges_of_a_file_share_the_work(on_sqlite: PurgedInbox) -> None:
    on_sqlite.seed("billing", day_of(OLD), 20_000)
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(on_sqlite.beside.purge)
        here = on_sqlite.purge()
        assert here.rows + beside.result(PATIENCE).rows == 20_000
    assert on_sqlite.rows() == 0


@pytest.mark.parametrize(("journal", "during"), [("wal", {1}), ("delete", {2})])
def test_a_step_keeps_writers_waiting_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: str, during: set[int]
) -> None:
    """Only in WAL mode: elsewhere a power cut could damage the file."""
    engine = create_engine(f"sqlite:///{tmp_path}/steps.db")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {journal}")
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(contract())
    seen: set[int] = set()
    step = SqliteStore.days_below

    def watched(self: SqliteStore, connection: Connection, *args: Any) -> list[int]:
        seen.add(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())
        return step(self, connection, *args)

    monkeypatch.setattr(SqliteStore, "days_below", watched)
    inbox.purge()
    with engine.connect() as connection:
        after = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("synchronous", "wal_autocheckpoint")
        ]
    engine.dispose()
    assert seen == during
    assert after == [2, 1000]


@pytest.mark.parametrize("auto_vacuum", [0, 2])
def test_a_file_shrinks_if_it_was_made_for_that(tmp_path: Path, auto_vacuum: int) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/space.db")
    with engine.begin() as connection:
        connection.exec_driver_sql(f"PRAGMA auto_vacuum = {auto_vacuum}")
        connection.exec_driver_sql("VACUUM")
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(contract())
    with engine.begin() as connection:
        old = day_of(OLD)
        rows = [("billing", str(number), old, old, bytes(32), 0.0, "done") for number in range(5_000)]
        connection.exec_driver_sql("INSERT INTO onceward_dedup VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        before = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    assert inbox.purge().rows == 5_000
    with engine.connect() as connection:
        after = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    engine.dispose()
    assert (after == before, free > 0) == (auto_vacuum == 0, auto_vacuum == 0)


# ── PostgreSQL: whole days ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-011b")
def test_a_day_that_nobody_needs_goes_as_a_whole_and_days_to_come_are_made(
    on_postgresql: PurgedInbox,
) -> None:
    on_postgresql.beside.register(contract("other"))
    for consumer_id in ("billing", "other"):
        on_postgresql.seed(consumer_id, day_of(OLD), 1_000)
    report = on_postgresql.purge()
    assert report.rows == 2_000
    assert report.dropped == [partitions.partition_of(day_of(OLD))]
    assert (report.days, report.days_done) == (1, 1)
    today = on_postgresql.scalar("SELECT extract(epoch FROM now())::bigint / 86400")
    assert set(on_postgresql.partitions()) >= set(range(today, today + 8))
    assert day_of(OLD) not in on_postgresql.partitions()


def test_a_day_goes_once_the_last_consumer_is_past_it(on_postgresql: PurgedInbox) -> None:
    on_postgresql.beside.register(contract("other"))
    for consumer_id in ("billing", "other"):
        on_postgresql.seed(consumer_id, day_of(OLD), 10)
    assert on_postgresql.purge("other").dropped == []
    assert on_postgresql.purge("billing").dropped == [partitions.partition_of(day_of(OLD))]


def test_a_dropped_day_is_made_again_for_who_may_still_need_it(on_postgresql: PurgedInbox) -> None:
    longer = contract("archive", dedup_days=400)
    on_postgresql.beside.register(longer)
    on_postgresql.seed("billing", day_of(OLD), 10)
    assert len(on_postgresql.purge().dropped) == 1
    assert on_postgresql.process(event("replayed", OLD), longer) is Handling.DONE
    assert on_postgresql.process(event("replayed", OLD), longer) is Handling.DUPLICATE
    assert on_postgresql.refused(event("replayed", OLD)) is Breach.TOO_OLD


@pytest.mark.req("CC-011b")
@pytest.mark.parametrize("what", ["event", "consumer"])
def test_a_hold_between_detach_and_drop_is_not_lost(
    on_postgresql: PurgedInbox, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    on_postgresql.seed("billing", day_of(OLD), 5)
    held = seeded(day_of(OLD), 3) if what == "event" else None
    drop = partitions.drop

    def hold_first(*args: Any) -> Any:
        on_postgresql.beside.hold("billing", held, reason="case 7", operator="anna")
        return drop(*args)

    monkeypatch.setattr(partitions, "drop", hold_first)
    report = on_postgresql.purge()
    if held is None:
        assert (report.rows, report.dropped) == (0, [])
        assert on_postgresql.rows() == 5, "attached again, with everything in it"
    else:
        assert (report.rows, report.kept) == (4, 1)
        assert on_postgresql.scalar("SELECT tracking_id FROM onceward_kept") == held


def test_a_detached_day_that_somebody_needs_is_attached_again(on_postgresql: PurgedInbox) -> None:
    longer = contract("archive", dedup_days=400)
    on_postgresql.beside.register(longer)
    on_postgresql.process(event("mine", OLD), longer)
    on_postgresql.execute(
        f"ALTER TABLE onceward_dedup DETACH PARTITION {partitions.partition_of(day_of(OLD))}"
    )
    assert on_postgresql.purge().dropped == []
    assert on_postgresql.process(event("mine", OLD), longer) is Handling.DUPLICATE


def test_an_event_of_a_detached_day_finds_it_attached_again(on_postgresql: PurgedInbox) -> None:
    on_postgresql.process(event("done", 3))
    on_postgresql.execute(f"ALTER TABLE onceward_dedup DETACH PARTITION {partitions.partition_of(day_of(3))}")
    assert on_postgresql.process(event("done", 3)) is Handling.DUPLICATE
    assert on_postgresql.process(event("next", 3)) is Handling.DONE


@pytest.mark.req("CC-011b")
def test_consumers_do_not_wait_while_a_purge_waits(
    on_postgresql: PurgedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purge waits for a transaction that has used the old day. Nothing waits for the purge."""
    monkeypatch.setattr(partitions, "LOCK_WAIT", PATIENCE)
    site = on_postgresql
    site.seed("billing", day_of(OLD), 10)
    site.process(event("before", 0))
    with ThreadPoolExecutor() as pool, site.observer.connect() as idle:
        idle.execute(text("SELECT count(*) FROM onceward_dedup"))
        purge = pool.submit(site.beside.purge)
        until(lambda: site.partitions()[day_of(OLD)] is PartitionState.DETACHING)
        for number in range(20):
            assert site.process(event(f"meanwhile {number}", 0)) is Handling.DONE
        assert site.process(event("before", 0)) is Handling.DUPLICATE
        assert site.process(event("needs a new partition", 40)) is Handling.DONE
        assert site.refused(event("of that day", OLD)) is Breach.TOO_OLD
        assert not purge.done()
        idle.rollback()
        assert len(purge.result(PATIENCE).dropped) == 1


@pytest.mark.req("CC-011b")
@pytest.mark.usefixtures("impatient")
def test_a_purge_that_is_blocked_says_by_whom_and_the_next_one_goes_on(on_postgresql: PurgedInbox) -> None:
    site = on_postgresql
    longer = contract("archive", dedup_days=400)
    site.beside.register(longer)
    site.process(event("held", OLD))
    site.process(event("free", OLD))
    site.beside.hold("billing", id_of("held", OLD), reason="case 7", operator="anna")
    with site.observer.connect() as idle:
        idle.execute(text("SELECT count(*) FROM onceward_dedup"))
        pid = idle.scalar(text("SELECT pg_backend_pid()"))
        report = site.purge()
        assert report.dropped == []
        [unfinished] = report.unfinished
        assert f"process {pid}" in unfinished
        assert site.partitions()[day_of(OLD)] is PartitionState.DETACHING
        # Nothing is lost or done twice in this state.
        assert site.process(event("held", OLD)) is Handling.DUPLICATE
        assert site.refused(event("free", OLD)) is Breach.TOO_OLD
        with pytest.raises(Exception, match="is being removed"):
            site.process(event("of another", OLD), longer)
        assert site.purge().unfinished == report.unfinished
    report = site.purge()
    assert (report.unfinished, len(report.dropped)) == ([], 1)
    assert site.process(event("held", OLD)) is Handling.DUPLICATE
    assert site.process(event("of another", OLD), longer) is Handling.DONE


@pytest.mark.usefixtures("impatient")
def test_nothing_goes_while_somebody_may_not_see_the_raised_horizon(on_postgresql: PurgedInbox) -> None:
    """Under REPEATABLE READ, the old horizon would admit an event, which would then not find its record."""
    site = on_postgresql
    site.seed("billing", day_of(OLD), 10)
    with site.observer.connect().execution_options(isolation_level="REPEATABLE READ") as old:
        old.execute(text("SELECT 1"))
        report = site.purge()
        assert (report.rows, site.rows()) == (0, 10)
        assert "does not see the raised horizon yet" in report.unfinished[0]
    assert site.purge().rows == 10


@pytest.mark.usefixtures("impatient")
def test_a_hold_that_is_being_placed_is_waited_for(on_postgresql: PurgedInbox) -> None:
    site = on_postgresql
    site.beside.register(contract("archive", retention="legal-hold"))
    for consumer_id in ("archive", "billing"):
        site.seed(consumer_id, day_of(OLD), 5)
    with site.observer.begin() as placing:
        placing.execute(
            text("INSERT INTO onceward_holds VALUES ('billing', :id, 'case 7', 'anna', 0)"),
            {"id": seeded(day_of(OLD), 3)},
        )
        report = site.purge()
        assert (report.rows, len(report.unfinished)) == (0, 1)
    assert site.purge().rows == 4


def test_a_second_purge_says_who_is_purging(
    on_postgresql: PurgedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = on_postgresql
    site.seed("billing", day_of(OLD), 10)
    inside, go_on = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(partitions, "await_old_snapshots", wait)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(site.beside.purge)
        assert inside.wait(PATIENCE)
        with pytest.raises(PurgeInProgressError, match=r"another purge is running: process [0-9]+"):
            site.purge()
        go_on.set()
        assert first.result(PATIENCE).rows == 10
    assert site.purge().rows == 0, "and afterwards it may"


def test_a_purge_leaves_its_connection_as_it_was(on_postgresql: PurgedInbox) -> None:
    before = on_postgresql.scalar("SHOW lock_timeout")
    on_postgresql.beside.purge()
    assert on_postgresql.scalar("SHOW lock_timeout") == before
    assert on_postgresql.scalar("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


@pytest.mark.req("CC-011b")
@pytest.mark.parametrize("plan", ["force_custom_plan", "force_generic_plan"])
def test_looking_up_and_admitting_touch_one_partition(on_postgresql: PurgedInbox, plan: str) -> None:
    for days_ago in range(5):
        on_postgresql.seed("billing", day_of(days_ago), 10, prefix=str(days_ago))
    look_up = (
        postgresql._LOOK_UP.replace(":place", "$1").replace(":consumer", "$2").replace(":tracking", "$3")
    )
    admit = (
        postgresql._ADMIT_AND_RESOLVE.replace("{now}", "0")
        .replace(":place", "$1")
        .replace(":consumer", "$2")
        .replace(":tracking", "$3")
        .replace(":content", "$4")
        .replace(":payload", "$4")
        .replace(":lock", "$5")
        .replace(":own_day", "NULL")
        .replace(":day", "$1")
    )
    with on_postgresql.observer.connect() as connection:
        run = connection.exec_driver_sql
        run(f"SET plan_cache_mode = {plan}")
        run(f"PREPARE look_up (bigint, text, text) AS {look_up}")
        run(f"PREPARE admit (bigint, text, text, bytea, bigint) AS {admit}")
        looked = run(f"EXPLAIN (ANALYZE) EXECUTE look_up ({day_of(2)}, 'billing', 'x')").scalars().all()
        admitted = run(f"EXPLAIN EXECUTE admit ({day_of(2)}, 'billing', 'x', '', 1)").scalars().all()
        connection.rollback()
    assert named_partitions(looked) == {partitions.partition_of(day_of(2))}
    assert named_partitions(admitted) == set()


def named_partitions(plan: Any) -> set[str]:
    words = " ".join(plan).replace("(", " ").replace(")", " ").split()
    return {word for word in words if word.startswith("onceward_dedup_2") and not word.endswith("_pkey")}


# ── a purge that dies ───────────────────────────────────────────────────────────────────────────────────


def finish(site: PurgedInbox) -> PurgeReport:
    """Purge again. The server may take a moment to notice that the dead one is gone."""
    return retry(site.purge, PurgeInProgressError)


def prepare_crash(site: PurgedInbox, *, whole_days: bool) -> None:
    site.process(event("held", OLD))
    site.process(event("free", OLD))
    site.process(event("new", 1))
    site.beside.hold("billing", id_of("held", OLD), reason="case 7", operator="anna")
    for days_ago in (OLD, OLD + 1):
        site.seed("billing", day_of(days_ago), 500)
    if not whole_days:
        site.beside.register(contract("archive", retention="legal-hold"))
        for days_ago in (OLD, OLD + 1):
            site.seed("archive", day_of(days_ago), 1)


def check_after_crash(site: PurgedInbox) -> None:
    """What must hold at any time: nothing runs again, and held and recent events are known."""
    assert site.process(event("held", OLD)) is Handling.DUPLICATE
    assert site.refused(event("free", OLD)) is Breach.TOO_OLD
    assert site.process(event("new", 1)) is Handling.DUPLICATE
    assert site.handled == ["held", "free", "new"]


@pytest.mark.req("CC-011b")
def test_a_purge_that_is_killed_when_the_horizon_is_raised_has_lost_nothing(site: PurgedInbox) -> None:
    prepare_crash(site, whole_days=True)
    assert site.purger("horizon").wait(PATIENCE) == -9
    assert site.rows() == 1_003
    assert site.refused(event("never seen", OLD)) is Breach.TOO_OLD, "it is unknown which rows are gone"
    assert site.process(event("free", OLD)) is Handling.DUPLICATE
    assert finish(site).rows == 1_001
    check_after_crash(site)


@pytest.mark.req("CC-011b")
def test_a_purge_that_is_killed_between_two_steps_is_finished_by_the_next(site: PurgedInbox) -> None:
    prepare_crash(site, whole_days=False)
    assert site.purger("midst").wait(PATIENCE) == -9
    left = site.rows()
    assert 2 < left < 1_003
    assert finish(site).rows == left - 2
    assert (site.rows(), site.rows("archive")) == (2, 2)
    check_after_crash(site)


@pytest.mark.req("CC-011b")
@pytest.mark.parametrize("place", ["detached", "dropping"])
def test_a_purge_that_is_killed_between_detach_and_drop_is_finished_by_the_next(
    on_postgresql: PurgedInbox, place: str
) -> None:
    site = on_postgresql
    prepare_crash(site, whole_days=True)
    assert site.purger(place).wait(PATIENCE) == -9
    assert site.partitions()[day_of(OLD + 1)] is PartitionState.DETACHED
    assert finish(site).unfinished == []
    assert {day_of(OLD), day_of(OLD + 1)}.isdisjoint(site.partitions())
    check_after_crash(site)


@pytest.mark.req("CC-011b")
def test_a_purge_that_is_killed_while_it_detaches_is_finished_by_the_next(on_postgresql: PurgedInbox) -> None:
    site = on_postgresql
    prepare_crash(site, whole_days=True)
    with site.observer.connect() as idle:
        idle.execute(text("SELECT count(*) FROM onceward_dedup"))
        purger = site.purger("detaching")
        until(lambda: PartitionState.DETACHING in site.partitions().values())
        purger.kill()
        assert purger.wait(PATIENCE) == -9
        assert site.process(event("held", OLD)) is Handling.DUPLICATE
        waits = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%DETACH PARTITION%' AND pid <> pg_backend_pid()"
        site.scalar(
            f"SELECT pg_terminate_backend(pid) FROM ({waits}) AS w"
        )  # as a lost connection would, in time
        until(lambda: site.scalar(waits) is None)
    assert PartitionState.DETACHING in site.partitions().values()
    assert len(finish(site).dropped) == 2
    check_after_crash(site)


@pytest.mark.req("CN-09")
def test_one_purge_raises_the_horizon_by_a_month_at_most(site: PurgedInbox) -> None:
    site.purge()
    right = site.horizon()
    assert right is not None
    site.execute("UPDATE onceward_horizons SET floor_day = :day", day=right - 100)
    age = day_of(0) - right + 20
    site.process(event("kept", age))
    report = site.purge()
    assert site.horizon() == right - 69
    assert "one purge raises the horizon by at most 31 days" in report.unfinished[0]
    assert site.process(event("kept", age)) is Handling.DUPLICATE
    site.call("purge", trust_clock=True)
    assert (site.horizon(), site.rows()) == (right, 0)


# ── partitions of several days ──────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-090")
def test_a_partition_of_several_days_goes_when_the_last_of_them_is_old(
    on_postgresql: PurgedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "OWN_DAYS", (7, 7))
    monkeypatch.setattr(partitions, "SPAN", 100_000)
    site = on_postgresql
    ages = (OLD, OLD + 50, 100, 60, 30)
    for age in ages:
        assert site.process(event("done", age)) is Handling.DONE
    before = len(site.partitions())
    site.beside.hold("billing", id_of("done", OLD), reason="case 7", operator="anna")
    report = site.purge()
    assert (report.dropped, report.unfinished, report.rows) == ([], [], 2)
    assert len(site.partitions()) >= before, "events of its later days still come"
    for age in (OLD, 60, 30):
        assert site.process(event("done", age)) is Handling.DUPLICATE
    assert site.refused(event("done", OLD + 50)) is Breach.TOO_OLD


@pytest.mark.req("CC-090")
def test_old_partitions_of_several_days_are_dropped_and_what_is_on_hold_is_kept(
    on_postgresql: PurgedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "OWN_DAYS", (7, 7))
    monkeypatch.setattr(partitions, "SPAN", 16)
    site = on_postgresql
    for age in range(OLD, OLD + 48):
        site.process(event("done", age))
    site.beside.hold("billing", id_of("done", OLD + 3), reason="case 7", operator="anna")
    report = site.purge()
    assert len(report.dropped) in (3, 4)
    assert (report.rows, report.kept) == (47, 1)
    assert site.process(event("done", OLD + 3)) is Handling.DUPLICATE


@pytest.mark.req("CC-090")
def test_a_migration_back_gives_each_day_its_partition(
    on_postgresql: PurgedInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "OWN_DAYS", (7, 7))
    site = on_postgresql
    ages = (OLD, OLD + 1, OLD + 50, 3)
    for age in ages:
        site.process(event("done", age))
    site.call("migrate", back_to=9)
    assert {day_of(age) for age in ages} <= set(site.partitions())
    assert site.rows() == len(ages)
    site.call("migrate")
    assert [site.process(event("done", age)) for age in ages] == [Handling.DUPLICATE] * len(ages)
