"""Old facts, and a full store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from onceward._time import Moment
from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.errors import Backpressure, BoundaryError, InvalidArgument
from onceward.boundary.model import Appended, Envelope, Fact, Gap, envelope_for, fact_of
from onceward.boundary.retention import Retention
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.errors import ConfigurationError
from onceward.testing.boundary import fact as plain
from tests.support.wait import until_async

DAY = 86400.0
NOW = 1_800_000_000.0


def on_boundary(place: Path, body: Callable[[Boundary], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        store = SqliteBoundaryStore(place)
        try:
            await body(Boundary(store, BoundarySettings(**settings)))
        finally:
            await store.close()

    asyncio.run(main())


def aged(boundary: Boundary) -> Callable[..., Awaitable[Any]]:
    async def append(message_id: str, days: float, stream: str = "operational") -> Any:
        return await boundary.store.append(
            plain(message_id, stream=stream, appended_at=int((NOW - days * DAY) * 1000))
        )

    return append


def metric(boundary: Boundary, name: str, **labels: str) -> float:
    return boundary.metrics.registry.get_sample_value(name, labels) or 0.0


# ── age ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-21")
def test_facts_are_kept_for_a_week_unless_their_class_says_otherwise(tmp_path: Path) -> None:
    async def body(boundary: Boundary) -> None:
        append = aged(boundary)
        await append("old", 7.01)
        await append("audit", 300, "audit")
        await append("very old audit", 400, "audit")
        await append("documents", 7.01, "documents")
        await append("young", 6.99)
        await boundary.store.trust_time(Moment(NOW))
        await boundary.register("c")
        assert await Retention(boundary, clock=lambda: NOW).sweep() == 3
        records, _ = await boundary.fetch("c", 10)
        assert [record[0] for record in records] == [2]
        assert metric(boundary, "onceward_boundary_expired_facts_total") == 3
        await boundary.confirm("c", 2)
        records, gap = await boundary.fetch("c", 10)
        assert ([record[0] for record in records], gap) == ([5], Gap(3, 4))

    on_boundary(tmp_path, body, retention={"audit": 365 * DAY})


@pytest.mark.req("BC-21")
def test_a_slow_consumer_is_warned_of_before_its_facts_expire_and_notified_of_the_gap_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(boundary: Boundary) -> None:
        append = aged(boundary)
        await boundary.fetch("slow", 1)
        await append("m1", 5.0)
        await append("m2", 0.0)
        now = NOW
        retention = Retention(boundary, clock=lambda: now)
        await retention.sweep()
        assert caplog.messages == []
        assert metric(boundary, "onceward_boundary_consumer_facts_expiring", consumer="slow") == 0

        now = NOW + 1 * DAY
        await retention.sweep()
        (warning,) = caplog.records
        assert (warning.levelno, vars(warning)["consumer"], vars(warning)["offset"]) == (
            logging.WARNING,
            "slow",
            1,
        )
        assert "expires in 86400 s" in warning.getMessage()
        assert metric(boundary, "onceward_boundary_consumer_facts_expiring", consumer="slow") == 1

        caplog.clear()
        now = NOW + 3 * DAY
        assert await retention.sweep() == 1
        (error,) = caplog.records
        assert (error.levelno, vars(error)["outcome"]) == (logging.ERROR, "expired")
        assert metric(boundary, "onceward_boundary_expired_unconfirmed_total", consumer="slow") == 1
        records, gap = await boundary.fetch("slow", 10)
        assert ([record[0] for record in records], gap) == ([2], Gap(1, 1))

    on_boundary(tmp_path, body)


@pytest.mark.req("BC-21")
def test_of_a_consumer_that_never_comes_back_the_log_says_so_once_an_hour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A forgotten name is behind a log that expires all the time."""

    async def body(boundary: Boundary) -> None:
        append = aged(boundary)
        await boundary.fetch("forgotten", 1)
        for number in range(100):
            await append(f"m{number}", 7.0 - number / 24 / 30)  # every two minutes
        await boundary.store.trust_time(Moment(NOW - 3600))
        now = NOW - 3600
        retention = Retention(boundary, clock=lambda: now)
        while now < NOW + 7200:
            await retention.sweep()
            now += 60
        outcomes = [vars(each)["outcome"] for each in caplog.records]
        assert (outcomes.count("expiring"), outcomes.count("expired")) == (3, 2)
        assert metric(boundary, "onceward_boundary_expired_unconfirmed_total", consumer="forgotten") > 50

        caplog.clear()
        await boundary.confirm("forgotten", 100)
        await retention.sweep()
        await append("late", 6.9)
        await retention.sweep()
        assert [vars(each)["outcome"] for each in caplog.records] == ["expiring"]

    on_boundary(tmp_path, body)


@pytest.mark.req("BC-21")
def test_a_consumer_that_has_confirmed_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(boundary: Boundary) -> None:
        await aged(boundary)("m1", 8.0)
        await boundary.fetch("c", 1)
        await boundary.confirm("c", 1)
        await boundary.store.trust_time(Moment(NOW))
        assert await Retention(boundary, clock=lambda: NOW).sweep() == 1
        assert caplog.messages == []

    on_boundary(tmp_path, body)


def test_it_looks_again_and_again_while_it_runs_and_survives_a_store_that_is_away(tmp_path: Path) -> None:
    async def body(boundary: Boundary) -> None:
        looks = 0
        look = boundary.store.expire

        async def failing(older_than: Any, at_most: Any) -> int:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise BoundaryError("away")
            return await look(older_than, at_most)

        boundary.store.expire = failing  # type: ignore[method-assign]
        await aged(boundary)("m1", 8.0)
        await boundary.store.trust_time(Moment(NOW))
        retention = Retention(boundary, every=0.001, clock=lambda: NOW)
        retention.start()

        async def has_expired() -> bool:
            return (await boundary.store.bounds()).first > 1

        await until_async(has_expired)
        await retention.close()
        assert looks >= 2

    on_boundary(tmp_path, body)


# ── fill ────────────────────────────────────────────────────────────────────────────────────────────────


async def fill_up(boundary: Boundary, start: int = 0) -> int:
    """Append until it is refused; returns how many were accepted."""
    for number in range(start, 100_000):
        envelope = envelope_for(f"m{number}", from_zone="a", to_zone="b")
        try:
            await boundary.append(envelope, fact_of("a:b", "done", "x" * 5000))
        except Backpressure:
            return number
    raise AssertionError("never full")


@pytest.mark.req("BC-24")
def test_a_store_that_is_too_full_refuses_keeps_what_it_has_and_takes_facts_again_after_draining(
    tmp_path: Path,
) -> None:
    async def body(boundary: Boundary) -> None:
        taken = await fill_up(boundary)
        assert taken > 10
        assert 75 <= await boundary.fill.percent() <= 80
        assert (await boundary.store.bounds()).last == taken
        records, _ = await boundary.fetch("c", 1000)
        assert len(records) == taken, "reading goes on"
        assert await boundary.confirm("c", taken) == taken

        await boundary.store.drop(taken // 2)
        envelope = envelope_for(f"m{taken}", from_zone="a", to_zone="b")
        assert await boundary.append(envelope, fact_of("a:b", "done", "x" * 5000)) == Appended(taken + 1)

    on_boundary(tmp_path, body, capacity_bytes=1_000_000)


@pytest.mark.req("BC-24")
def test_forwarded_facts_meet_the_same_limit(tmp_path: Path) -> None:
    async def body(boundary: Boundary) -> None:
        taken = await fill_up(boundary)
        message = (envelope_for("new", from_zone="a", to_zone="b"), fact_of("a:b", "done", "x" * 5000))
        with pytest.raises(
            Backpressure, match=r"the store is full: its facts take [0-9,]+ bytes and may take 800,000"
        ) as raised:
            await boundary.append_all([message])
        assert raised.value.retryable
        assert (await boundary.store.bounds()).last == taken

    on_boundary(tmp_path, body, capacity_bytes=1_000_000)


@pytest.mark.req("BC-24")
def test_the_oldest_are_dropped_only_when_that_was_asked_for_and_consumers_are_notified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(boundary: Boundary) -> None:
        await boundary.fetch("slow", 1)
        for number in range(400):
            envelope = envelope_for(f"m{number}", from_zone="a", to_zone="b")
            await boundary.append(envelope, fact_of("a:b", "done", "x" * 5000))
            bounds = await boundary.store.bounds()
        assert bounds.last == 400
        assert bounds.first > 200
        assert metric(boundary, "onceward_boundary_dropped_facts_total") == bounds.first - 1
        assert "oldest facts" in caplog.text
        _, gap = await boundary.fetch("slow", 1)
        assert gap == Gap(1, bounds.first - 1)

    on_boundary(tmp_path, body, capacity_bytes=1_000_000, drop_oldest=True)


@pytest.mark.req("BC-24")
def test_dropping_is_refused_where_facts_must_not_be_lost() -> None:
    with pytest.raises(ConfigurationError, match="safety forbids"):
        BoundarySettings(drop_oldest=True, safety=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"backpressure_at": 0},
        {"backpressure_at": 1.5},
        {"capacity_bytes": 0},
        {"max_consumers": -1},
        {"max_objects": -1},
        {"max_object_bytes": -1},
        {"max_labels": -1},
        {"retention": {"audits": 5.0}},
        {"retention": {"audit": 0.0}},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        BoundarySettings(**wrong)


@pytest.mark.req("BC-36")
def test_a_fact_that_can_never_fit_is_invalid_unless_it_is_there(tmp_path: Path) -> None:
    async def body(boundary: Boundary) -> None:
        envelope, fact = envelope_for("m1", from_zone="a", to_zone="b"), fact_of("a:b", "done", "x" * 90_000)
        with pytest.raises(
            InvalidArgument, match=r"about 90,\d+ bytes, but all facts of this boundary may take 80,000"
        ):
            await boundary.append(envelope, fact)
        with pytest.raises(InvalidArgument, match=r"fact.object_json"):
            await boundary.append_all([(envelope, fact)])
        appended = await Boundary(boundary.store).append(envelope, fact)
        assert await boundary.append(envelope, fact) == Appended(appended.offset, duplicate=True)

    on_boundary(tmp_path, body, capacity_bytes=100_000)


@pytest.mark.req("BC-24", "BC-36")
def test_many_facts_at_once_are_all_appended_where_the_oldest_are_dropped(tmp_path: Path) -> None:
    async def body(boundary: Boundary) -> None:
        def message(number: int) -> tuple[Envelope, Fact]:
            return envelope_for(f"m{number}", from_zone="a", to_zone="b"), fact_of("a:b", "done", "x" * 5000)

        await asyncio.gather(*(boundary.append(*message(number)) for number in range(300)))
        assert (await boundary.store.bounds()).last == 300
        outcomes = await boundary.append_all([message(number) for number in range(1000, 1300)])
        offsets = [outcome.offset for outcome in outcomes if isinstance(outcome, Appended)]
        assert offsets == list(range(301, 601)), "more than there is room for, in order"
        assert await boundary.store.size() <= 800_000

    on_boundary(tmp_path, body, capacity_bytes=1_000_000, drop_oldest=True)
