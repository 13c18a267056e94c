"""Metrics: everything in the catalog is counted, without the user's help."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator

import pytest

from onceward.task.exceptions import ConsumerLoopTimeoutException
from onceward.task.settings import EngineSettings
from onceward.telemetry.catalogue import METRICS
from onceward.telemetry.conventions import Destination
from onceward.testing import Recording, record
from tests.support.wait import until
from tests.support.world import (
    SHORT,
    Deaf,
    ListSource,
    Until,
    World,
    business,
    consuming,
    resolve,
    results,
    retry,
    system,
    transactions,
)


@pytest.fixture
def recording() -> Iterator[Recording]:
    with record() as made:
        yield made


@pytest.mark.req("CE-26")
def test_outcomes_are_counted_by_category(world: World, recording: Recording) -> None:
    process = results(1, business(), system(), Until(lambda: False))
    task = world.consumer(process, source=ListSource(transactions(4)))
    world.consume(task, consuming(process=retry(timeout=SHORT)))
    assert recording.metric("onceward.transactions.processed", task="Orders") == 4
    assert recording.metric("onceward.transactions.succeeded") == 1
    for category in ("BUSINESS", "SYSTEM", "TIMEOUT"):
        assert recording.metric("onceward.transactions.failed", category=category) == 1
    assert recording.metric("onceward.attempts.timeouts", step="process", limit="step") == 1


@pytest.mark.req("CE-26")
def test_outcomes_are_counted_at_once_while_the_loop_streams(world: World, recording: Recording) -> None:
    def counts() -> list[int]:
        names = ("processed", "succeeded", "failed")
        return [recording.metric(f"onceward.transactions.{name}") for name in names]

    def last(_: object) -> Until:
        task.stop()
        return Until(lambda: counts() == [3, 1, 2])

    steps = [lambda _: 1, results(business()), results(system()), last]
    source = ListSource(transactions(4))
    task = world.consumer(lambda transaction: steps[transaction.payload](transaction), source=source)
    report = world.consume(task, consuming(streaming=True))
    assert (report.succeeded, report.failed) == (2, 2)
    assert counts() == [4, 2, 2]
    assert recording.metric("onceward.transactions.failed", category="BUSINESS") == 1


def test_what_is_abandoned_is_counted_at_once_and_only_once(recording: Recording) -> None:
    world = World("asyncio")
    end = threading.Event()
    seen: list[int] = []

    def count() -> int:
        return int(recording.metric("onceward.transactions.abandoned"))

    def observe() -> None:
        with contextlib.suppress(AssertionError):
            seen.append(until(count))
        end.set()

    def first(_: object) -> Until:
        task.stop()
        task.hurry()
        return Until(lambda: False)

    steps = [lambda _: Deaf(end, limit=60), first]
    source = ListSource(transactions(2))
    task = world.consumer(lambda transaction: steps[transaction.payload](transaction), source=source)
    task.interruptible = True
    observer = threading.Thread(target=observe)
    observer.start()
    report = world.consume(task, consuming(streaming=True, concurrency=2))
    observer.join()
    assert seen == [1], "while the other one was still running"
    assert report.abandoned == count() == 2


def test_what_never_ends_is_counted_as_abandoned_when_the_loop_ends(
    world: World, recording: Recording
) -> None:
    end = threading.Event()
    task = world.consumer(lambda _: Deaf(end, limit=30), source=ListSource(transactions(1)))
    try:
        with pytest.raises(ConsumerLoopTimeoutException):
            world.consume_then(task, consuming(timeout=SHORT), end.set)
        assert recording.metric("onceward.transactions.abandoned") == 1
    finally:
        end.set()


def test_retries_backoff_and_durations_are_counted_by_step(world: World, recording: Recording) -> None:
    task = world.consumer(results(system(), system(), 1), source=ListSource(transactions(1)))
    world.consume(task, consuming(process=retry(3, backoff=0.01, backoff_multiplier=2)))
    assert recording.metric("onceward.attempts.retries", step="process") == 2
    assert recording.metric("onceward.attempts.backoff", step="process") == pytest.approx(0.03)
    assert recording.metric("onceward.step.duration", step="process") == 3
    assert recording.metric("onceward.step.duration", step="success") == 1


def test_fetches_are_counted(world: World, recording: Recording) -> None:
    world.consume(world.consumer(source=ListSource(transactions(3))), consuming(batch=2))
    assert recording.metric("onceward.fetches") == 3
    assert recording.metric("onceward.fetches.empty") == 1


def test_slots_in_use_are_shown_while_they_are_in_use(world: World, recording: Recording) -> None:
    seen: list[int] = []

    def process(_: object) -> None:
        seen.append(recording.metric("onceward.slots.in_use", task="Orders"))

    world.consume(world.consumer(process, source=ListSource(transactions(1))))
    assert seen == [1]
    assert recording.metric("onceward.slots.in_use") == 0


def test_a_stuck_attempt_shows_as_stuck_until_it_ends(recording: Recording) -> None:
    world = World("threads")
    end = threading.Event()
    task = world.consumer(
        lambda _: Deaf(end, limit=30),
        source=ListSource(transactions(1)),
        settings=EngineSettings(stuck_grace=0.05),
    )
    try:
        report = world.consume(task, consuming(process=retry(timeout=SHORT)))
        assert report.stuck == 1
        assert recording.metric("onceward.slots.stuck") == 1
    finally:
        end.set()
    resolve(Until(lambda: recording.metric("onceward.slots.stuck") == 0))


def test_every_metric_that_is_made_is_in_the_catalogue(world: World, recording: Recording) -> None:
    world.consume(world.consumer(source=ListSource(transactions(1))))
    data = recording._reader.get_metrics_data()
    assert data is not None
    made = {
        metric.name
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert made <= set(METRICS)


def test_durations_have_buckets_for_seconds(world: World, recording: Recording) -> None:
    world.consume(world.consumer(source=ListSource(transactions(1))))
    data = recording._reader.get_metrics_data()
    assert data is not None
    [bounds] = {
        tuple(point.explicit_bounds)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "onceward.step.duration"
        for point in metric.data.data_points
    }
    assert bounds[0] < 0.001
    assert 1.0 in bounds


@pytest.mark.req("UI-23")
def test_a_consumer_has_the_metrics_of_the_conventions_for_messaging(
    world: World, recording: Recording
) -> None:
    task = world.consumer(results(1, business()), source=ListSource(transactions(2)))
    task.destination = Destination("redis", "orders", "billing")
    world.consume(task)
    where = {
        "messaging.system": "redis",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "billing",
    }
    fetching = where | {"messaging.operation.name": "fetch"}
    assert points(recording, "messaging.client.consumed.messages") == [(fetching, 2)]
    processing = where | {"messaging.operation.name": "process"}
    assert points(recording, "messaging.process.duration") == [
        (processing, 1),
        (processing | {"error.type": "BUSINESS"}, 1),
    ]
    operations = by_operation(points(recording, "messaging.client.operation.duration"))
    assert operations["fetch"] >= 1


@pytest.mark.req("UI-23")
def test_a_producer_counts_what_it_sends_and_what_fails(world: World, recording: Recording) -> None:
    task = world.producer(results("sent", business(), "sent"))
    task.destination = Destination("nats", "ORDERS")
    world.produce(task, transactions(3))
    sending = {
        "messaging.system": "nats",
        "messaging.destination.name": "ORDERS",
        "messaging.operation.name": "send",
    }
    assert points(recording, "messaging.client.sent.messages") == [
        (sending, 2),
        (sending | {"error.type": "BUSINESS"}, 1),
    ]
    assert by_operation(points(recording, "messaging.client.operation.duration")) == {"send": 3}
    assert points(recording, "messaging.client.consumed.messages") == []


@pytest.mark.req("UI-23")
def test_a_task_that_does_not_know_its_messaging_system_has_no_metrics_of_the_conventions(
    world: World, recording: Recording
) -> None:
    world.consume(world.consumer(results(1), source=ListSource(transactions(1))))
    assert [name for name in METRICS if name.startswith("messaging.") and points(recording, name)] == []


def points(recording: Recording, name: str) -> list[tuple[dict[str, object], float]]:
    """Attributes and value, of a histogram how many values, sorted by error."""
    found = [
        (dict(point.attributes or {}), getattr(point, "count", None) or point.value)
        for point in recording.points(name)
    ]
    return sorted(found, key=lambda each: str(each[0].get("error.type", "")))


def by_operation(found: list[tuple[dict[str, object], float]]) -> dict[object, float]:
    """How many, by the name of the operation."""
    counts: dict[object, float] = defaultdict(float)
    for attributes, number in found:
        counts[attributes["messaging.operation.name"]] += number
    return dict(counts)
