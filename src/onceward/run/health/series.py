"""The numbers of a run for Prometheus: a collector, and its page.

To add a gauge, add a line to the list of the function it belongs to: `_of_workers`, `_of_deliveries`, `_of_sources`,
`_of_database`. Leave out what is not known; never report 0 for it.

Gauges and the counts of deliveries are by worker. What is known of attempts is by consumer, over all workers. No
counter goes down when a worker is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from onceward.connectors.reports import SourceBacklog
from onceward.run import tally
from onceward.run.protocol import ConsumerStatus, WorkerState
from onceward.run.samples import Reading, Samples
from onceward.run.scoreboard import Score
from onceward.run.tally import Histogram

if TYPE_CHECKING:
    from onceward.run.supervisor import Supervisor, WorkerSlot

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Labeled(NamedTuple):
    labels: Mapping[str, str]
    value: float


class Workers(NamedTuple):
    supervisor: Supervisor
    is_live: Callable[[WorkerSlot], bool]
    is_ready: Callable[[WorkerSlot], bool]


class Series(Collector):
    """Collects what the workers last reported, and the last samples. Waits for nothing. `workers` is None where no
    worker is seen, as in a mounted console."""

    def __init__(self, workers: Workers | None, samples: Samples | None) -> None:
        self._workers = workers
        self._samples = samples
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if self._workers is not None:
            places = list(self._workers.supervisor.places)
            yield from _of_workers(places, self._workers.is_live, self._workers.is_ready)
            yield from _of_deliveries(places)
            yield from _of_attempts(tallies(self._workers.supervisor))
        if self._samples is not None:
            yield from _of_sources(self._samples)
            yield from _of_database(self._samples)

    def page(self) -> str:
        return generate_latest(self._registry).decode()


def tallies(supervisor: Supervisor) -> dict[str, list[int]]:
    """Add up what all processes counted, also those that have ended."""
    found = dict(supervisor.totals.tallies)
    for place in supervisor.places:
        for name, score in place.process.scores().items() if place.process is not None else ():
            found[name] = tally.added([found.get(name) or (0,) * tally.SIZE, score.tally])
    return found


def _of_workers(
    places: list[WorkerSlot], is_live: Callable[[WorkerSlot], bool], is_ready: Callable[[WorkerSlot], bool]
) -> Iterator[Metric]:
    families: list[tuple[str, str, Callable[[WorkerSlot], float]]] = [
        ("up", "1 if the worker's process runs.", lambda place: place.process is not None),
        ("live", "1 if work in flight makes progress.", is_live),
        ("ready", "1 if the sources of all its consumers answer.", is_ready),
        ("restarts_total", "Processes that were started again.", lambda place: place.restarts),
    ]
    for short, text, value in families:
        samples = (Labeled({"worker": str(place.number)}, value(place)) for place in places)
        yield _family(f"onceward_worker_{short}", text, samples)
    pools = [
        (place, pool)
        for place in places
        if place.process is not None and place.process.status is not None
        for pool in place.process.status.pools
    ]
    of_pools: list[tuple[str, str, Callable[[tuple[str, int, int]], int]]] = [
        ("in_use", "Database connections in use.", lambda pool: pool[1]),
        ("size", "Database connections that the pool may open.", lambda pool: pool[2]),
    ]
    for short, text, number in of_pools:
        labeled = [({"worker": str(place.number), "mode": pool[0]}, pool) for place, pool in pools]
        yield _family(
            f"onceward_pool_{short}", text, (Labeled(labels, number(pool)) for labels, pool in labeled)
        )


def _of_deliveries(places: list[WorkerSlot]) -> Iterator[Metric]:
    now = time.monotonic()
    counters: list[tuple[str, str, Callable[[Score | ConsumerStatus], float]]] = [
        ("succeeded_total", "Deliveries that succeeded.", lambda each: each.succeeded),
        ("failed_total", "Deliveries that failed.", lambda each: each.failed),
        ("returned_total", "Deliveries given back to the source.", lambda each: each.returned),
    ]
    for short, text, count in counters:
        samples = [
            Labeled(labels, sum(count(each) for each in parts))
            for place in places
            for labels, parts in _done(place)
        ]
        yield _family(f"onceward_consumer_{short}", text, samples)
    gauges: list[tuple[str, str, Callable[[ConsumerStatus], float]]] = [
        ("in_flight", "Deliveries that are not settled.", lambda each: each.in_flight),
        (
            "oldest_in_flight_seconds",
            "Age of the oldest of them.",
            lambda each: _since(each.oldest_since, now),
        ),
        ("idle_seconds", "Time since the last fetch or settlement.", lambda each: now - each.progress_at),
        ("stuck", "Attempts given up on that still run.", lambda each: each.stuck),
        ("paused", "1 if an operator has paused it.", lambda each: each.paused),
        (
            "outage",
            "1 while its source, its database or what it needs is down.",
            lambda each: each.state is WorkerState.WAITING or each.down_since is not None,
        ),
        (
            "outage_seconds",
            "Since when what it needs is down.",
            lambda each: 0.0 if each.down_since is None else max(time.time() - each.down_since, 0.0),
        ),
    ]
    for short, text, value in gauges:
        samples = [
            Labeled(_labels(place, each.name), value(each)) for place in places for each in consumers(place)
        ]
        yield _family(f"onceward_consumer_{short}", text, samples)
    of_limits: list[tuple[str, str, Callable[[ConsumerStatus], float]]] = [
        ("limit_waiting", "Messages in the worker that wait for the limit.", lambda each: each.limited or 0),
        (
            "limit_wait_seconds",
            "How long the oldest of them has waited.",
            lambda each: _since(each.limited_since, now),
        ),
    ]
    for short, text, value in of_limits:
        samples = [
            Labeled(_labels(place, each.name), value(each))
            for place in places
            for each in consumers(place)
            if each.limited is not None
        ]
        yield _family(f"onceward_consumer_{short}", text, samples)


def _of_attempts(found: Mapping[str, list[int]]) -> Iterator[Metric]:
    yield _family(
        "onceward_consumer_attempts_total",
        "Attempts at messages, by how they ended.",
        (
            Labeled({"consumer": name, "outcome": outcome}, count)
            for name, row in found.items()
            for outcome, count in tally.outcomes(row).items()
        ),
    )
    yield _family(
        "onceward_consumer_duplicates_total",
        "Messages that were skipped because they had been done before.",
        (Labeled({"consumer": name}, tally.outcomes(row)["duplicate"]) for name, row in found.items()),
    )
    histograms: list[tuple[str, str, Callable[[list[int]], Histogram]]] = [
        ("duration_seconds", "How long attempts took, with their commit.", tally.durations),
        ("retries", "Attempts before the one that did it.", tally.retries),
    ]
    for short, text, read in histograms:
        family = HistogramMetricFamily(f"onceward_consumer_{short}", text, labels=["consumer"])
        for name, row in found.items():
            histogram = read(row)
            family.add_metric([name], list(histogram.cumulative()), sum_value=histogram.sum)
        yield family


def _of_sources(samples: Samples) -> Iterator[Metric]:
    gauges: list[tuple[str, str, Callable[[SourceBacklog], float | None]]] = [
        ("waiting", "Messages that are due and not delivered.", lambda each: each.waiting),
        ("in_flight", "Messages that are delivered and not settled.", lambda each: each.in_flight),
        ("delayed", "Messages that are due later.", lambda each: each.delayed),
        ("dead_letters", "Dead letters that the source itself keeps.", lambda each: each.dead),
        ("oldest_age_seconds", "Age of the oldest message that has not ended.", lambda each: each.oldest_age),
    ]
    readings = list(samples.sources.items())
    for short, text, value in gauges:
        known = ((name, value(reading.current)) for name, reading in readings if reading.current is not None)
        yield _family(
            f"onceward_source_{short}",
            text,
            [Labeled({"consumer": name}, number) for name, number in known if number is not None],
        )
    asked = [({"consumer": name}, reading) for name, reading in readings]
    yield from _of_readings("source", "the source", asked)


def _of_database(samples: Samples) -> Iterator[Metric]:
    known = samples.database.current is not None
    yield _family(
        "onceward_dead_letters",
        "Open dead letters.",
        (
            Labeled({"consumer": name, "category": category}, samples.dead(name).get(category, 0))
            for name in samples.consumers
            for category in (_categories() if known else ())
        ),
    )
    yield _family(
        "onceward_consumer_parked",
        "Events that wait for an earlier one of their aggregate.",
        (Labeled({"consumer": name}, samples.parked(name) or 0) for name in samples.consumers if known),
    )
    yield _family(
        "onceward_consumer_held_keys",
        "Keys whose later events wait for a dead one.",
        (Labeled({"consumer": name}, samples.held_keys(name)) for name in samples.consumers if known),
    )
    outbox = samples.outbox
    yield _family(
        "onceward_outbox_waiting",
        "Messages in the outbox that are due and not published.",
        [] if outbox is None else [Labeled({}, outbox.waiting)],
    )
    yield _family(
        "onceward_outbox_oldest_waiting_seconds",
        "Age of the oldest of them.",
        [] if outbox is None else [Labeled({}, outbox.age)],
    )
    yield from _of_readings("database", "the database", [({}, samples.database)])


def _categories() -> Iterable[str]:
    """Of dead letters. Their room loads SQLAlchemy, which an app without a database does not need."""
    from onceward.deadletters.letter import Category

    return Category


def _of_readings(
    what: str, words: str, readings: Iterable[tuple[dict[str, str], Reading[Any]]]
) -> Iterator[Metric]:
    asked = [(labels, each) for labels, each in readings if each.at is not None or each.problem is not None]
    yield _family(
        f"onceward_{what}_up",
        f"1 if {words} answered the last sample.",
        (Labeled(labels, each.problem is None) for labels, each in asked),
    )
    yield _family(
        f"onceward_{what}_sample_age_seconds",
        f"Age of the numbers of {words}.",
        (Labeled(labels, each.age) for labels, each in asked if each.age is not None),
    )


def consumers(place: WorkerSlot) -> list[ConsumerStatus]:
    process = place.process
    return [] if process is None or process.status is None else process.status.consumers


def _done(place: WorkerSlot) -> Iterator[tuple[dict[str, str], list[Score | ConsumerStatus]]]:
    """What the processes of a worker have done, one after the other."""
    running = {each.name: each for each in consumers(place)}
    for name in dict.fromkeys([*place.past, *running]):
        parts = [place.past.get(name), running.get(name)]
        yield _labels(place, name), [each for each in parts if each is not None]


def _labels(place: WorkerSlot, consumer: str) -> dict[str, str]:
    return {"worker": str(place.number), "consumer": consumer}


def _since(moment: float | None, now: float) -> float:
    return 0.0 if moment is None else max(now - moment, 0.0)


def _family(name: str, text: str, samples: Iterable[Labeled]) -> Metric:
    """A counter if its name says so, otherwise a gauge."""
    found = list(samples)
    labels = list(found[0].labels) if found else []
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=labels)
    for each in found:
        family.add_metric(list(each.labels.values()), float(each.value))
    return family
