"""A boundary under the engines: concurrent work, a cursor that skips nothing, and no wasted fetches."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError

from onceward import AsyncProducerTask, ProducerTask, Transaction
from onceward.boundary import AsyncBoundaryClient, BoundaryClient, Page
from onceward.boundary.errors import ConflictingDuplicate, Unavailable
from onceward.boundary.model import Gap
from onceward.connectors import ConnectorClosedError, PayloadError
from onceward.connectors.boundary import AsyncBoundaryConnector, BoundaryConnector
from onceward.connectors.boundary.base import MOST_HELD
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ConsumerLoopTimeoutException, FetchException
from onceward.task.mixins.policies import EmptyQueuePolicy
from onceward.testing import record
from tests.support.boundary.connector_world import RECEIVER, ConnectorWorld, fill, made, numbers, site_at
from tests.support.world import After, Until, World, consuming, producing, retry


@pytest.fixture
def site(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Iterator[ConnectorWorld]:
    fill(tmp_path / "boundary", getattr(request, "param", 0))
    with site_at(world, tmp_path / "boundary") as made:
        yield made


class Produce(ProducerTask):
    def produce_transaction(self, transaction: Transaction) -> None:
        self.connectors["boundary"].dispatch_transactions([transaction])


class AsyncProduce(AsyncProducerTask):
    async def produce_transaction(self, transaction: Transaction) -> None:
        await self.connectors["boundary"].dispatch_transactions_async([transaction])


# ── under the engines ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-27")
@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_engines_produce_to_a_boundary_and_consume_from_it_concurrently(
    site: ConnectorWorld, mode: Any
) -> None:
    connector = site.connector()

    base: Any = AsyncProduce if site.world.asynchronous else Produce
    producer = base({"boundary": connector})
    report = site.world.produce(producer, [made(number) for number in range(60)], producing(concurrency=8))
    assert report.succeeded == 60
    running: set[str] = set()
    most = 0
    lock = threading.Lock()

    def process(transaction: Transaction) -> Any:
        nonlocal most
        with lock:
            running.add(transaction.id)
            most = max(most, len(running))
        return Until(lambda: most >= 4, transaction.id)

    def success(transaction: Transaction, _: Any) -> None:
        with lock:
            running.discard(transaction.id)

    consumer = site.world.consumer(process, success=success, source=connector)
    report = site.world.consume(consumer, consuming(batch=20, concurrency=4, mode=mode))
    assert (report.succeeded, report.failed) == (60, 0)
    assert sorted(each for step, each in site.world.calls if step == "process") == sorted(
        f"m{number}" for number in range(60)
    )
    assert site.cursor() == 60


@pytest.mark.req("BC-27")
def test_only_what_is_done_without_a_hole_is_confirmed(site: ConnectorWorld) -> None:
    connector = site.connector()
    site.dispatch(connector, *(made(number, "batch:one") for number in range(1, 7)))
    one, two, three, four, five = site.fetch(connector, 5)
    site.done(connector, two, three)
    site.done(connector, five)
    assert (site.cursor(), site.confirmed) == (0, [])
    site.done(connector, one)
    assert (site.cursor(), site.confirmed) == (3, [3])
    site.done(connector, four)
    assert site.cursor() == 5
    assert numbers(site.fetch(connector)) == [6]


@pytest.mark.req("BC-27")
def test_whatever_order_work_ends_in_nothing_is_confirmed_before_it_is_done(site: ConnectorWorld) -> None:
    """With failures, which come again."""
    dice = random.Random(7)
    connector = site.connector(redelivery_delay=0.01, clock=time.time)
    site.dispatch(connector, *(made(number, "batch:one") for number in range(1, 81)))
    done: set[int] = set()
    failed: set[int] = set()

    def process(transaction: Transaction) -> Any:
        offset = transaction.metadata["offset"]
        assert offset > max(site.confirmed, default=0), "confirmed before it was done"
        if offset % 9 == 0 and offset not in failed:
            failed.add(offset)
            raise RuntimeError("not yet")
        return After(dice.random() * 0.02)

    def on_confirm(offset: int) -> None:
        assert done >= set(range(1, offset + 1)), "confirmed beyond something that is not done"

    site.on_confirm = on_confirm
    consumer = site.world.consumer(
        process, success=lambda each, _: done.add(each.metadata["offset"]), source=connector
    )
    policy = consuming(batch=10, concurrency=6, mode="continuous", streaming=True, limit=80 + 8)
    report = site.world.consume(consumer, policy)
    assert (report.succeeded, report.failed) == (80, 8)
    assert site.cursor() == 80
    assert site.confirmed == sorted(set(site.confirmed))


@pytest.mark.req("BC-27")
def test_a_fact_that_fails_comes_again_after_a_while_and_holds_the_cursor_meanwhile(
    site: ConnectorWorld,
) -> None:
    connector = site.connector(redelivery_delay=10.0)
    site.dispatch(connector, *(made(number, "batch:one") for number in range(1, 5)))
    one, two = site.fetch(connector, 2)
    site.fail(connector, one)
    site.done(connector, two)
    site.done(connector, *site.fetch(connector))
    assert site.cursor() == 0
    assert site.fetch(connector) == []
    site.clock.advance(10.5)
    (again,) = site.fetch(connector)
    assert again == one
    site.done(connector, again)
    assert site.cursor() == 4


def test_what_an_engine_abandons_comes_again_when_its_lease_runs_out(site: ConnectorWorld) -> None:
    """A call that times out leaves its work unsettled. The next one uses the same connector."""
    connector = site.connector(lease=5.0)
    site.dispatch(connector, made(1))
    (abandoned,) = site.fetch(connector)
    assert site.fetch(connector) == []
    site.clock.advance(6.0)
    (again,) = site.fetch(connector)
    site.done(connector, abandoned)
    assert site.cursor() == 0, "a newer delivery owns the message"
    site.done(connector, again)
    assert site.cursor() == 1


def test_an_outcome_that_could_not_be_confirmed_is_confirmed_later(site: ConnectorWorld) -> None:
    failures = [Unavailable("away"), Unavailable("away")]

    def on_confirm(_: int) -> None:
        if failures:
            raise failures.pop()

    site.on_confirm = on_confirm
    connector = site.connector()
    site.dispatch(connector, *map(made, range(5)))
    report = site.world.consume(
        site.world.consumer(source=connector), consuming(fetch=retry(3), batch=5, concurrency=5)
    )
    assert report.succeeded == 5
    assert site.cursor() == 5


def test_what_was_settled_while_the_boundary_was_away_is_confirmed_with_the_next_fetch(
    site: ConnectorWorld,
) -> None:
    connector = site.connector()
    site.dispatch(connector, made(1))
    fetched = site.fetch(connector)

    def away(_: int) -> None:
        raise Unavailable("away")

    site.on_confirm = away
    with pytest.raises(Unavailable):
        site.done(connector, *fetched)
    site.on_confirm = lambda _: None
    assert site.fetch(connector) == []
    assert site.cursor() == 1


def test_a_boundary_that_is_away_is_a_fetch_error_and_the_next_run_goes_on(site: ConnectorWorld) -> None:
    connector = site.connector()
    site.dispatch(connector, made(1))
    consumer = site.world.consumer(source=connector)
    real = site.client.fetch

    def away(*_: Any) -> Any:
        raise Unavailable("away")

    site.client.fetch = away
    with pytest.raises(FetchException, match="away"):
        site.world.consume(consumer)
    site.client.fetch = real
    assert site.world.consume(consumer).succeeded == 1


# ── the window ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-27")
@pytest.mark.parametrize("site", [MOST_HELD + 200], indirect=True)
def test_behind_a_fact_that_fails_a_thousand_are_fetched_and_no_more(
    site: ConnectorWorld, caplog: pytest.LogCaptureFixture
) -> None:
    connector = site.connector(redelivery_delay=10.0)
    (first,) = site.fetch(connector, 1)
    site.fail(connector, first)
    behind = 0
    while batch := site.fetch(connector):
        site.done(connector, *batch)
        behind += len(batch)
    assert MOST_HELD - 100 <= behind < MOST_HELD
    assert site.cursor() == 0
    assert sum(site.sent) < 4 * MOST_HELD, "facts in flight were sent again too often"
    # Blocked: it checks for a moved cursor with a page of one, and not in a hot loop.
    site.asked.clear()
    began = time.monotonic()
    for _ in range(5):
        assert site.fetch(connector) == []
    assert set(site.asked) == {1}
    assert time.monotonic() - began > 0.5
    assert sum("fetches no further: the fact at offset 1 " in each.message for each in caplog.records) == 1
    site.clock.advance(10.5)
    site.done(connector, *site.fetch(connector, 1))
    assert site.cursor() == behind + 1
    while batch := site.fetch(connector):
        site.done(connector, *batch)
        behind += len(batch)
    assert (behind + 1, site.cursor()) == (MOST_HELD + 200, MOST_HELD + 200)


@pytest.mark.parametrize("site", [400], indirect=True)
def test_what_is_held_is_sent_again_less_and_less_often(site: ConnectorWorld) -> None:
    """Small batches behind one that takes long: without care, every batch would fetch the whole window again."""
    connector = site.connector()
    site.fetch(connector, 1)
    behind = 1
    while batch := site.fetch(connector, 5):
        site.done(connector, *batch)
        behind += len(batch)
    assert behind == 400
    assert sum(site.sent) < 4 * 400
    assert len(site.asked) < 20, "80 batches"


@pytest.mark.parametrize("site", [200], indirect=True)
def test_with_much_in_hand_and_nothing_new_the_boundary_is_asked_at_a_measured_pace(
    site: ConnectorWorld,
) -> None:
    connector = site.connector()
    assert len(site.fetch(connector, 200)) == 200
    site.asked.clear()
    began = time.monotonic()
    for _ in range(8):
        assert site.fetch(connector) == []
    assert time.monotonic() - began > 7 * 200 * 0.0002
    assert len(site.asked) == 8


def test_an_idle_consumer_asks_as_seldom_as_its_policy_says(site: ConnectorWorld) -> None:
    empty = EmptyQueuePolicy(backoff=0.1, backoff_multiplier=2.0)
    policy = consuming(streaming=True, timeout=1.0, empty_queue=empty)
    with pytest.raises(ConsumerLoopTimeoutException):
        site.world.consume(site.world.consumer(source=site.connector()), policy)
    assert 1 <= len(site.asked) <= 5, "0, 0.1, 0.3 and 0.7 s"


def test_work_that_comes_up_is_handed_out_without_asking_if_it_fills_the_batch(site: ConnectorWorld) -> None:
    connector = site.connector()
    site.dispatch(connector, *map(made, range(50)))
    site.fetch(connector, 10)  # 10, all in flight
    site.fetch(connector, 10)  # 2 * 10 + 10 are requested, and 10 of the 20 new ones stay here
    assert (site.asked, len(site.fetch(connector, 10)), len(site.asked)) == ([10, 30], 10, 2)


def test_what_another_of_the_same_name_has_confirmed_is_dropped(site: ConnectorWorld) -> None:
    one, two = site.connector(), site.connector()
    site.dispatch(one, *(made(number, "batch:one") for number in range(1, 5)))
    (stuck,) = site.fetch(one, 1)
    site.fail(one, stuck)
    assert numbers(site.fetch(one, 1)) == [2]
    others = site.fetch(two)
    assert numbers(others) == [1, 2, 3, 4], "two readers with one name see the same facts"
    site.done(two, *others)
    site.dispatch(one, made(5))
    assert numbers(site.fetch(one)) == [5]
    site.clock.advance(50)
    assert site.fetch(one) == []


def test_a_new_connector_begins_at_the_cursor(site: ConnectorWorld) -> None:
    first = site.connector()
    site.dispatch(first, *(made(number, "batch:one") for number in range(1, 5)))
    one, _, three, _ = site.fetch(first)
    site.done(first, one, three)
    site.call(first, "close")
    assert numbers(site.fetch(site.connector())) == [2, 3, 4]


def test_facts_that_have_expired_are_reported_once(
    site: ConnectorWorld, caplog: pytest.LogCaptureFixture
) -> None:
    connector = site.connector()
    page = Page((), Gap(1, 5))

    async def fetch_async(*_: Any) -> Page:
        return page

    site.client.fetch = fetch_async if site.world.asynchronous else lambda *_: page
    for _ in range(3):
        site.fetch(connector)
    assert [each.message for each in caplog.records if each.levelno == logging.ERROR] == [
        f"consumer {RECEIVER} missed facts 1 to 5: they have expired"
    ]


# ── dispatching ─────────────────────────────────────────────────────────────────────────────────────────


def test_facts_of_one_subject_keep_their_order_and_all_arrive(site: ConnectorWorld) -> None:
    connector = site.connector()
    site.dispatch(connector, *(made(number, f"batch:{number % 5}") for number in range(100)))
    log = site.log()
    assert sorted(log) == list(range(100))
    for lane in range(5):
        assert [number for number in log if number % 5 == lane] == list(range(lane, 100, 5))


def test_one_that_is_no_fact_keeps_the_whole_dispatch_from_happening(site: ConnectorWorld) -> None:
    with pytest.raises(PayloadError, match="the-bad-one"):
        site.dispatch(site.connector(), made(1), Transaction("the-bad-one", {"total": 7}))
    assert site.log() == []


def test_dispatching_again_is_safe_and_the_same_id_with_other_content_is_refused(
    site: ConnectorWorld,
) -> None:
    connector = site.connector()
    site.dispatch(connector, made(1), made(2))
    other = Transaction("m2", {"subject": "batch:2", "predicate": "made", "object": {"number": -2}})
    with pytest.raises(ConflictingDuplicate, match="m2"):
        site.dispatch(connector, other)
    site.dispatch(connector, made(1), made(2), made(3))
    assert sorted(site.log()) == [1, 2, 3]


def test_after_an_error_no_further_facts_are_sent(site: ConnectorWorld) -> None:
    sent: list[str] = []

    async def refuse(method: str, request: Any, grace: float = 0.0) -> Any:
        sent.append(method)
        raise ConnectError(Code.UNAVAILABLE, "away")

    site.client._calls.port.ask = refuse
    with pytest.raises(Unavailable, match="away"):
        site.dispatch(site.connector(), *map(made, range(3000)))
    assert sent == ["append_facts"]


# ── contents ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_consumer_sees_what_was_produced(site: ConnectorWorld) -> None:
    began = made(1, correlation_id="c1", parent_id="p1", metadata={"tenant": "a", "baggage": "k=v"})
    connector = site.connector()
    site.dispatch(connector, began)
    (again,) = site.fetch(connector)
    assert (again.id, again.payload) == (began.id, began.payload)
    assert (again.correlation_id, again.parent_id) == ("c1", "p1")
    assert again.created_at == began.created_at.replace(
        microsecond=began.created_at.microsecond // 1000 * 1000
    )
    assert again.metadata == {
        "tenant": "a",
        "baggage": "k=v",
        "event_type": "made",
        "aggregate_id": "batch:1",
        "offset": 1,
        "from_zone": "plant-a",
        "to_zone": "hq",
    }


def test_a_consumers_spans_continue_the_producers_trace(site: ConnectorWorld) -> None:
    connector = site.connector()
    with record() as recording:
        tracer = recording.tracer_provider.get_tracer("a producer")
        with tracer.start_as_current_span("produce it") as span:
            site.dispatch(connector, made(1))
        site.world.consume(site.world.consumer(source=connector))
    life = recording.span("start_processing")
    assert life.context is not None
    assert life.parent is not None
    assert life.context.trace_id == span.get_span_context().trace_id
    assert life.parent.span_id == span.get_span_context().span_id


# ── settings, and closing ───────────────────────────────────────────────────────────────────────────────


def test_after_close_every_call_raises(site: ConnectorWorld) -> None:
    connector = site.connector()
    site.dispatch(connector, made(1))
    fetched = site.fetch(connector)
    site.call(connector, "close")
    site.call(connector, "close")
    for call in (
        lambda: site.fetch(connector),
        lambda: site.dispatch(connector, made(2)),
        lambda: site.done(connector, *fetched),
        lambda: site.call(connector, "extend_transactions", fetched),
        lambda: site.call(connector, "forget_dead", []),
    ):
        with pytest.raises(ConnectorClosedError, match="boundary connector is closed"):
            call()
    assert (site.cursor(), site.log()) == (0, [1])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "consumer_name to consume, from_zone and to_zone to produce"),
        ({"consumer_name": ""}, "consumer_name is missing"),
        ({"consumer_name": "two\nlines"}, "consumer_name"),
        ({"from_zone": "a"}, "both from_zone and to_zone"),
        ({"consumer_name": "x", "to_zone": "a"}, "both from_zone and to_zone"),
        ({"consumer_name": "x", "redelivery_delay": 0}, "redelivery_delay"),
        ({"consumer_name": "x", "lease": 0}, "lease"),
    ],
)
def test_what_cannot_work_is_reported_at_construction(
    world: World, settings: dict[str, Any], problem: str
) -> None:
    client: Any = (AsyncBoundaryClient if world.asynchronous else BoundaryClient)("http://127.0.0.1:1")
    kind: Any = AsyncBoundaryConnector if world.asynchronous else BoundaryConnector
    with pytest.raises(ConfigurationError, match=problem):
        kind(client, **settings)


def test_a_client_of_the_other_mode_is_reported_at_construction() -> None:
    with pytest.raises(
        ConfigurationError, match="BoundaryConnector needs a BoundaryClient, not AsyncBoundary"
    ):
        BoundaryConnector(AsyncBoundaryClient("http://127.0.0.1:1"), "x")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match="AsyncBoundaryConnector needs a AsyncBoundaryClient, not Boun"
    ):
        AsyncBoundaryConnector(BoundaryClient("http://127.0.0.1:1"), "x")  # type: ignore[arg-type]


def test_a_connector_that_only_produces_does_not_consume_and_the_other_way_round(
    site: ConnectorWorld,
) -> None:
    with pytest.raises(ConfigurationError, match="consumer_name"):
        site.fetch(site.connector(None))
    with pytest.raises(ConfigurationError, match="from_zone and to_zone"):
        site.dispatch(site.connector(from_zone=None, to_zone=None), made(1))
