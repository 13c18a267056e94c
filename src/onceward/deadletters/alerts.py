"""Alerts for operators: as metrics, and as log lines with the same names.

`new`: a letter was buried. `many_of_a_type`: more than ten of one type are open. `surge`: more than ten times as many
in five minutes as usual (less than one counts as one). `same_aggregate`: three or more letters of one aggregate are
open. `holds_key`: its consumer keeps order, and later events of its key wait for it. `died_again`, `poisoned`: how a
redriven letter ended.

Large numbers are not reported with every letter: only when they pass the limit, when they are twice as large as last
reported, and otherwise with the first letter after ten minutes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from opentelemetry.metrics import MeterProvider

from onceward.deadletters.burial import Burial
from onceward.telemetry import metrics
from onceward.telemetry.catalogue import METRICS, SCOPE
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.safety import SafeMeter

_log = OwnLogger(logging.getLogger("onceward.deadletters"))

MANY_OF_A_TYPE: Final = 10
SURGE: Final = 10
SURGE_SECONDS: Final = 300
BASELINE_SECONDS: Final = 86400
SAME_AGGREGATE: Final = 3
REPEAT_SECONDS: Final = 600
GROWN: Final = 2
"""A number is reported again when it is this many times as large as last reported."""

LEVELS: Final = {
    "new": logging.INFO,
    "many_of_a_type": logging.WARNING,
    "surge": logging.CRITICAL,
    "same_aggregate": logging.CRITICAL,
    "holds_key": logging.ERROR,
    "died_again": logging.WARNING,
    "poisoned": logging.ERROR,
}


class LetterCount(NamedTuple):
    """A number of letters that causes an alert above its limit."""

    kind: str
    whose: tuple[str, ...]
    """What is counted: a consumer, and a type or aggregate."""
    letters: int
    limit: float
    at: float
    words: str


Buried = tuple[Burial, Mapping[str, Any] | None]
"""A burial, and how many letters are like it. None if another one of its kind was buried together with it."""


class Alerts:
    """Sends alerts, and remembers them. Each store has its own, so each process alerts independently."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, ...], tuple[float, int]] = {}
        """When each was sent, and for how many letters; oldest first."""
        self._lock = threading.Lock()

    def send(self, buried: Sequence[Buried]) -> None:
        """Send alerts; call this after the commit, because a burial that was rolled back did not happen."""
        metrics = _metrics()
        for burial, counts in buried:
            if metrics is not None:
                metrics["buried"].add(1, {"consumer": burial.consumer, "category": str(burial.category)})
            alerts = [("new", f"{burial.category}: {burial.error or burial.reason}")]
            if burial.order_key is not None:
                alerts.append(("holds_key", "later events of its key wait until it is redriven or discarded"))
            found = () if counts is None else _letter_counts(burial, counts)
            alerts += [(each.kind, each.words) for each in found if self._is_news(each)]
            for kind, words in alerts:
                _alert(kind, burial.consumer, burial.message_id, words, event_type=burial.event_type)

    def _is_news(self, count: LetterCount) -> bool:
        key = (count.kind, *count.whose)
        with self._lock:
            self._forget(count.at - REPEAT_SECONDS)
            at, letters = self._sent.get(key, (count.at, 0))
            if count.letters <= count.limit:
                self._sent.pop(key, None)
                return False
            if count.letters < GROWN * letters:
                self._sent[key] = (at, min(letters, count.letters))  # if it fell, growth counts from there
                return False
            self._sent.pop(key, None)  # moves it to the end
            self._sent[key] = (count.at, count.letters)
            return True

    def _forget(self, until: float) -> None:
        """Forget alerts sent up to then, so they can be sent again."""
        while self._sent:
            key, (at, _) = next(iter(self._sent.items()))
            if at > until:
                return
            del self._sent[key]


def _letter_counts(burial: Burial, counts: Mapping[str, Any]) -> list[LetterCount]:
    of_type, recent, of_aggregate = counts["of_type"], counts["recent"], counts["of_aggregate"]
    usual = counts["before"] * SURGE_SECONDS / (BASELINE_SECONDS - SURGE_SECONDS)
    at = float(counts["at"])
    return [
        LetterCount(
            "many_of_a_type",
            (burial.consumer, burial.event_type),
            of_type,
            MANY_OF_A_TYPE,
            at,
            f"{of_type} letters of type {burial.event_type!r} are open",
        ),
        LetterCount(
            "surge",
            (burial.consumer,),
            recent,
            SURGE * max(usual, 1.0),
            at,
            f"{recent} letters in five minutes; {usual:.1f} are usual",
        ),
        LetterCount(
            "same_aggregate",
            (burial.consumer, burial.aggregate_id or ""),
            of_aggregate,
            SAME_AGGREGATE - 1,
            at,
            f"{of_aggregate} letters of aggregate {burial.aggregate_id} are open",
        ),
    ]


def report_redriven(consumer: str, message_id: str, outcome: str, error: str = "") -> None:
    """Report how a redriven letter ended. A new death is also an alert."""
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


_counters: dict[int, tuple[MeterProvider, dict[str, Any]]] = {}


def _metrics() -> dict[str, Any] | None:
    provider = metrics.meter_provider()
    if provider is None:
        return None
    known = _counters.get(id(provider))
    if known is None or known[0] is not provider:
        meter = SafeMeter(provider, SCOPE)
        names = ("buried", "alerts", "redriven")
        counters: dict[str, Any] = {}
        for name in names:
            metric = METRICS[f"onceward.deadletters.{name}"]
            counters[name] = meter.create_counter(
                f"onceward.deadletters.{name}", metric.unit, metric.description
            )
        known = _counters[id(provider)] = (provider, counters)
    return known[1]
