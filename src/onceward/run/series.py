"""The numbers of a run, in the text format of Prometheus.

Gauges and the counts of deliveries are by worker. What is known of attempts is by consumer, over all workers. No
counter goes down when a worker is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from onceward.run import tally
from onceward.run.protocol import ConsumerStatus
from onceward.run.scoreboard import Score
from onceward.run.tally import Histogram

if TYPE_CHECKING:
    from onceward.run.supervisor import Supervisor, WorkerSlot

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float
    suffix: str = ""


def series(
    supervisor: Supervisor, is_live: Callable[[WorkerSlot], bool], is_ready: Callable[[WorkerSlot], bool]
) -> Iterator[str]:
    places = list(supervisor.places)
    yield from _of_workers(places, is_live, is_ready)
    yield from _of_deliveries(places)
    yield from _of_attempts(tallies(supervisor))
    yield from _of_outbox(places)


def tallies(supervisor: Supervisor) -> dict[str, list[int]]:
    """Add up what all processes counted, also those that have ended."""
    found = dict(supervisor.totals.tallies)
    for place in supervisor.places:
        for name, score in place.process.scores().items() if place.process is not None else ():
            found[name] = tally.added([found.get(name) or (0,) * tally.SIZE, score.tally])
    return found


def _of_workers(
    places: list[WorkerSlot], is_live: Callable[[WorkerSlot], bool], is_ready: Callable[[WorkerSlot], bool]
) -> Iterator[str]:
    families: list[tuple[str, str, str, Callable[[WorkerSlot], float]]] = [
        ("up", "gauge", "1 if the worker's process runs.", lambda place: place.process is not None),
        ("live", "gauge", "1 if work in flight makes progress.", is_live),
        ("ready", "gauge", "1 if the sources of all its consumers answer.", is_ready),
        ("restarts_total", "counter", "Processes that were started again.", lambda place: place.restarts),
    ]
    for short, kind, text, value in families:
        samples = (Sample({"worker": str(place.number)}, value(place)) for place in places)
        yield from _family(f"onceward_worker_{short}", kind, text, samples)


def _of_deliveries(places: list[WorkerSlot]) -> Iterator[str]:
    now = time.monotonic()
    counters: list[tuple[str, str, Callable[[Score | ConsumerStatus], float]]] = [
        ("succeeded_total", "Deliveries that succeeded.", lambda each: each.succeeded),
        ("failed_total", "Deliveries that failed.", lambda each: each.failed),
        ("returned_total", "Deliveries given back to the source.", lambda each: each.returned),
    ]
    for short, text, count in counters:
        samples = [
            Sample(labels, sum(count(each) for each in parts))
            for place in places
            for labels, parts in _done(place)
        ]
        yield from _family(f"onceward_consumer_{short}", "counter", text, samples)
    gauges: list[tuple[str, str, Callable[[ConsumerStatus], float]]] = [
        ("in_flight", "Deliveries that are not settled.", lambda each: each.in_flight),
        (
            "oldest_in_flight_seconds",
            "Age of the oldest of them.",
            lambda each: _since(each.oldest_since, now),
        ),
        ("idle_seconds", "Time since the last fetch or settlement.", lambda each: now - each.progress_at),
        ("stuck", "Attempts given up on that still run.", lambda each: each.stuck),
    ]
    for short, text, value in gauges:
        samples = [
            Sample(_labels(place, each.name), value(each)) for place in places for each in consumers(place)
        ]
        yield from _family(f"onceward_consumer_{short}", "gauge", text, samples)


def _of_attempts(found: Mapping[str, list[int]]) -> Iterator[str]:
    yield from _family(
        "onceward_consumer_attempts_total",
        "counter",
        "Attempts at messages, by how they ended.",
        (
            Sample({"consumer": name, "outcome": outcome}, count)
            for name, row in found.items()
            for outcome, count in tally.outcomes(row).items()
        ),
    )
    yield from _family(
        "onceward_consumer_duplicates_total",
        "counter",
        "Messages that were skipped because they had been done before.",
        (Sample({"consumer": name}, tally.outcomes(row)["duplicate"]) for name, row in found.items()),
    )
    histograms: list[tuple[str, str, Callable[[list[int]], Histogram]]] = [
        ("duration_seconds", "How long attempts took, with their commit.", tally.durations),
        ("retries", "Attempts before the one that did it.", tally.retries),
    ]
    for short, text, read in histograms:
        samples = [
            sample for name, row in found.items() for sample in _buckets({"consumer": name}, read(row))
        ]
        yield from _family(f"onceward_consumer_{short}", "histogram", text, samples)


def _of_outbox(places: list[WorkerSlot]) -> Iterator[str]:
    """All workers count the same table: the largest number is the most recent, or close to it."""
    counted = [each for place in places for each in consumers(place) if each.waiting is not None]
    gauges: list[tuple[str, str, Callable[[ConsumerStatus], float]]] = [
        ("waiting", "Messages in the outbox that are due and not published.", lambda each: each.waiting or 0),
        ("oldest_waiting_seconds", "Age of the oldest of them.", lambda each: each.waiting_for or 0.0),
    ]
    for short, text, value in gauges:
        samples = [Sample({}, max(map(value, counted)))] if counted else []
        yield from _family(f"onceward_outbox_{short}", "gauge", text, samples)


def consumers(place: WorkerSlot) -> list[ConsumerStatus]:
    process = place.process
    return [] if process is None or process.status is None else process.status.consumers


def _done(place: WorkerSlot) -> Iterator[tuple[dict[str, str], list[Score | ConsumerStatus]]]:
    """What the processes of a worker have done, one after the other."""
    running = {each.name: each for each in consumers(place)}
    for name in dict.fromkeys([*place.past, *running]):
        parts = [place.past.get(name), running.get(name)]
        yield _labels(place, name), [each for each in parts if each is not None]


def _buckets(labels: dict[str, str], histogram: Histogram) -> Iterator[Sample]:
    total = 0
    for limit, total in histogram.cumulative():
        yield Sample({**labels, "le": limit}, total, "_bucket")
    yield Sample(labels, histogram.sum, "_sum")
    yield Sample(labels, total, "_count")


def _labels(place: WorkerSlot, consumer: str) -> dict[str, str]:
    return {"worker": str(place.number), "consumer": consumer}


def _since(moment: float | None, now: float) -> float:
    return 0.0 if moment is None else max(now - moment, 0.0)


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for labels, value, suffix in samples:
        inside = ",".join(f'{label}="{_escape(given)}"' for label, given in labels.items())
        yield f"{name}{suffix}{f'{{{inside}}}' if inside else ''} {float(value):.15g}\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
