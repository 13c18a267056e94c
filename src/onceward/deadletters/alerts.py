"""What people should hear of: as metrics, and as log lines with the same words.

`new`: a letter was buried. `many_of_a_type`: more than ten of one type are open. `surge`: more than ten times as many
in five minutes as is usual (less than one counts as one). `same_aggregate`: three letters or more of one aggregate are
open. `died_again`, `poisoned`: what became of a redriven letter.

That there are many is no news with each further letter: it is told when they pass the limit, when they are twice as
many as were told of, and otherwise with the first letter after ten minutes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from opentelemetry.metrics import MeterProvider

from onceward.db.transaction import DbTransaction
from onceward.deadletters.letter import Burial
from onceward.storage.sql import Sql
from onceward.telemetry import metrics
from onceward.telemetry.catalogue import METRICS, SCOPE

_log = logging.getLogger("onceward.deadletters")

MANY_OF_A_TYPE: Final = 10
SURGE: Final = 10
SURGE_SECONDS: Final = 300
BASELINE_SECONDS: Final = 86400
SAME_AGGREGATE: Final = 3
REPEAT_SECONDS: Final = 600
GROWN: Final = 2
"""So many times as many as were told of are news."""

LEVELS: Final = {
    "new": logging.INFO,
    "many_of_a_type": logging.WARNING,
    "surge": logging.CRITICAL,
    "same_aggregate": logging.CRITICAL,
    "died_again": logging.WARNING,
    "poisoned": logging.ERROR,
}


class Many(NamedTuple):
    """A number of letters, and whether there is reason to tell of it."""

    kind: str
    whose: tuple[str, ...]
    """Consumer, and type or aggregate: what is counted."""
    letters: int
    limit: float
    """More than that are worth an alert."""
    at: float
    words: str


Told = tuple[Burial, list[Many]]
"""A burial, and the numbers that may have passed their limits with it."""


def raised_by(transaction: DbTransaction, rows: Sql, burials: Sequence[Burial]) -> list[Told]:
    """What there may be to tell about letters that were buried together. Numbers are looked up with the first of their
    kind: they are the same for all."""
    told: list[Told] = []
    seen: set[tuple[str, str, str | None]] = set()
    for burial in burials:
        whose = (burial.consumer, burial.event_type, burial.aggregate_id)
        told.append((burial, [] if whose in seen else _of_many(transaction, rows, burial)))
        seen.add(whose)
    return told


def _of_many(transaction: DbTransaction, rows: Sql, burial: Burial) -> list[Many]:
    counts = rows.first(
        transaction,
        _COUNTS,
        consumer=burial.consumer,
        event_type=burial.event_type,
        aggregate=burial.aggregate_id,
        recent=SURGE_SECONDS,
        baseline=BASELINE_SECONDS,
    )
    assert counts is not None
    of_type, recent, of_aggregate = counts["of_type"], counts["recent"], counts["of_aggregate"]
    usual = counts["before"] * SURGE_SECONDS / (BASELINE_SECONDS - SURGE_SECONDS)
    at = float(counts["at"])
    return [
        Many(
            "many_of_a_type",
            (burial.consumer, burial.event_type),
            of_type,
            MANY_OF_A_TYPE,
            at,
            f"{of_type} letters of type {burial.event_type!r} are open",
        ),
        Many(
            "surge",
            (burial.consumer,),
            recent,
            SURGE * max(usual, 1.0),
            at,
            f"{recent} letters in five minutes, where {usual:.1f} are usual",
        ),
        Many(
            "same_aggregate",
            (burial.consumer, burial.aggregate_id or ""),
            of_aggregate,
            SAME_AGGREGATE - 1,
            at,
            f"{of_aggregate} letters of aggregate {burial.aggregate_id} are open",
        ),
    ]


class Alerts:
    """Tells, and remembers what it told: one for each store, so that another process tells for itself."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, ...], tuple[float, int]] = {}
        """When, and of how many; the longest ago first."""
        self._lock = threading.Lock()

    def tell(self, told: Sequence[Told]) -> None:
        """After the commit: what was rolled back is nobody's business."""
        metrics = _metrics()
        for burial, numbers in told:
            if metrics is not None:
                metrics["buried"].add(1, {"consumer": burial.consumer, "category": str(burial.category)})
            alerts = [("new", f"{burial.category}: {burial.error or burial.reason}")]
            alerts += [(each.kind, each.words) for each in numbers if self._is_news(each)]
            for kind, words in alerts:
                _alert(kind, burial.consumer, burial.message_id, words, event_type=burial.event_type)

    def _is_news(self, many: Many) -> bool:
        key = (many.kind, *many.whose)
        with self._lock:
            self._forget(many.at - REPEAT_SECONDS)
            at, count = self._told.get(key, (many.at, 0))
            if many.letters <= many.limit:
                self._told.pop(key, None)
                return False
            if many.letters < GROWN * count:
                self._told[key] = (at, min(count, many.letters))  # where it fell, it grows from there
                return False
            self._told.pop(key, None)  # to the end
            self._told[key] = (many.at, many.letters)
            return True

    def _forget(self, until: float) -> None:
        """What was told so long ago is news again."""
        while self._told:
            key, (at, _) = next(iter(self._told.items()))
            if at > until:
                return
            del self._told[key]


def redriven(consumer: str, message_id: str, outcome: str, error: str = "") -> None:
    """What came of a redriven letter. A new death is worth a line."""
    metrics = _metrics()
    if metrics is not None:
        metrics["redriven"].add(1, {"consumer": consumer, "outcome": outcome})
    if outcome != "succeeded":
        _alert(outcome, consumer, message_id, error)


def _alert(kind: str, consumer: str, message_id: str, words: str, **more: str) -> None:
    _log.log(
        LEVELS[kind],
        "dead letter %s of consumer %s (%s): %s",
        message_id,
        consumer,
        kind,
        words,
        extra={"alert": kind, "consumer": consumer, **more},
    )
    metrics = _metrics()
    if metrics is not None:
        metrics["alerts"].add(1, {"consumer": consumer, "alert": kind})


_made: dict[int, tuple[MeterProvider, dict[str, Any]]] = {}


def _metrics() -> dict[str, Any] | None:
    provider = metrics.meter_provider()
    if provider is None:
        return None
    made = _made.get(id(provider))
    if made is None or made[0] is not provider:
        meter = provider.get_meter(SCOPE)
        names = ("buried", "alerts", "redriven")
        counters: dict[str, Any] = {}
        for name in names:
            metric = METRICS[f"onceward.deadletters.{name}"]
            counters[name] = meter.create_counter(
                f"onceward.deadletters.{name}", metric.unit, metric.description
            )
        made = _made[id(provider)] = (provider, counters)
    return made[1]


_COUNTS = """
    SELECT
        {now} AS at,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE status = 'open' AND consumer = :consumer AND event_type = :event_type) AS of_type,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE consumer = :consumer AND died_at > {now} - :recent) AS recent,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE consumer = :consumer AND died_at <= {now} - :recent AND died_at > {now} - :baseline) AS before,
        (SELECT count(*) FROM onceward_dead_letters WHERE status = 'open' AND consumer = :consumer
            AND aggregate_id = :aggregate) AS of_aggregate
"""
