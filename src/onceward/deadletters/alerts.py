"""What people should hear of: as metrics, and as log lines with the same words.

`new`: a letter was buried. `many_of_a_type`: more than ten of one type are open. `surge`: more than ten times as many
in five minutes as is usual (less than one counts as one). `same_aggregate`: three letters or more of one aggregate are
open. `died_again`, `poisoned`: what became of a redriven letter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from opentelemetry.metrics import MeterProvider

from onceward.db.transaction import DbTransaction
from onceward.deadletters.letter import Burial
from onceward.deadletters.rows import Rows
from onceward.telemetry import providers
from onceward.telemetry.catalogue import METRICS, SCOPE

_log = logging.getLogger("onceward.deadletters")

MANY_OF_A_TYPE: Final = 10
SURGE: Final = 10
SURGE_SECONDS: Final = 300
BASELINE_SECONDS: Final = 86400
SAME_AGGREGATE: Final = 3

LEVELS: Final = {
    "new": logging.INFO,
    "many_of_a_type": logging.WARNING,
    "surge": logging.CRITICAL,
    "same_aggregate": logging.CRITICAL,
    "died_again": logging.WARNING,
    "poisoned": logging.ERROR,
}


class Alert(NamedTuple):
    kind: str
    words: str


Told = tuple[Burial, list[Alert]]
"""A burial, and the alerts it gives reason for."""


def raised_by(transaction: DbTransaction, rows: Rows, burials: Sequence[Burial]) -> list[Told]:
    """What there is to tell about letters that were buried together. That there are many is told once, with the first
    of them."""
    told: list[Told] = []
    seen: set[tuple[str, ...]] = set()
    for burial in burials:
        alerts = [Alert("new", f"{burial.category}: {burial.error or burial.reason}")]
        whose = (burial.consumer, burial.event_type, burial.aggregate_id or "")
        if whose not in seen:
            fresh = _of_many(transaction, rows, burial)
            keys = {
                "many_of_a_type": (burial.consumer, burial.event_type),
                "surge": (burial.consumer,),
                "same_aggregate": whose[::2],
            }
            alerts += [each for each in fresh if (each.kind, *keys[each.kind]) not in seen]
            seen.update((each.kind, *keys[each.kind]) for each in fresh)
            seen.add(whose)
        told.append((burial, alerts))
    return told


def _of_many(transaction: DbTransaction, rows: Rows, burial: Burial) -> list[Alert]:
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
    alerts = []
    if counts["of_type"] > MANY_OF_A_TYPE:
        words = f"{counts['of_type']} letters of type {burial.event_type!r} are open"
        alerts.append(Alert("many_of_a_type", words))
    usual = counts["before"] * SURGE_SECONDS / (BASELINE_SECONDS - SURGE_SECONDS)
    if counts["recent"] > SURGE * max(usual, 1.0):
        words = f"{counts['recent']} letters in five minutes, where {usual:.1f} are usual"
        alerts.append(Alert("surge", words))
    if counts["of_aggregate"] >= SAME_AGGREGATE:
        words = f"{counts['of_aggregate']} letters of aggregate {burial.aggregate_id} are open"
        alerts.append(Alert("same_aggregate", words))
    return alerts


def tell(told: Sequence[Told]) -> None:
    """After the commit: what was rolled back is nobody's business."""
    metrics = _metrics()
    for burial, alerts in told:
        if metrics is not None:
            metrics["buried"].add(1, {"consumer": burial.consumer, "category": str(burial.category)})
        for alert in alerts:
            _log.log(
                LEVELS[alert.kind],
                "dead letter %s of consumer %s (%s): %s",
                burial.message_id,
                burial.consumer,
                alert.kind,
                alert.words,
                extra={"alert": alert.kind, "consumer": burial.consumer, "event_type": burial.event_type},
            )
            if metrics is not None:
                metrics["alerts"].add(1, {"consumer": burial.consumer, "alert": alert.kind})


def redriven(consumer: str, message_id: str, outcome: str, error: str = "") -> None:
    """What came of a redriven letter. A new death is worth a line."""
    metrics = _metrics()
    if metrics is not None:
        metrics["redriven"].add(1, {"consumer": consumer, "outcome": outcome})
    if outcome == "succeeded":
        return
    if metrics is not None:
        metrics["alerts"].add(1, {"consumer": consumer, "alert": outcome})
    _log.log(
        LEVELS[outcome],
        "dead letter %s of consumer %s (%s): %s",
        message_id,
        consumer,
        outcome,
        error,
        extra={"alert": outcome, "consumer": consumer},
    )


_made: dict[int, tuple[MeterProvider, dict[str, Any]]] = {}


def _metrics() -> dict[str, Any] | None:
    provider = providers.meter_provider()
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
        (SELECT count(*) FROM onceward_dead_letters
            WHERE status = 'open' AND consumer = :consumer AND event_type = :event_type) AS of_type,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE consumer = :consumer AND died_at > {now} - :recent) AS recent,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE consumer = :consumer AND died_at <= {now} - :recent AND died_at > {now} - :baseline) AS before,
        (SELECT count(*) FROM onceward_dead_letters WHERE status = 'open' AND consumer = :consumer
            AND aggregate_id = :aggregate) AS of_aggregate
"""
