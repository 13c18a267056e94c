"""Metrics and log lines of a link, for operators. Never a payload."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from onceward.boundary.links.skips import Skipped
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.model import Gap, Page, StoredFact
from onceward.errors import OncewardError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))


NOTHING_YET = "nothing yet"
Word = Literal["starting", "up", "down", "stopped"]


class LinkStopped(OncewardError):
    """A fact cannot be taken. All before it are here; it and those after it wait at the source."""

    def __init__(self, fact: StoredFact, reason: str) -> None:
        super().__init__(
            f"fact {fact.message_id!r} at offset {fact.offset} of the source cannot be taken: {reason}"
        )
        self.fact = fact


class LinkState(msgspec.Struct):
    """A link, as an operator sees it."""

    name: str
    state: Word
    """Stopped: a fact blocks it until an operator decides."""
    problem: str
    """Why it is not up."""
    consumer: str
    """Under which it pulls at the source."""
    frontier: int
    """The source's offset up to which everything has arrived."""
    waiting: int
    """Facts that it has seen waiting; the source may have more."""
    lag_seconds: float
    """The age of the oldest of them; while the source cannot be reached, that which one waiting there could have."""
    missed: int
    """Facts that expired at the source before."""
    source: str = ""
    """Its URL."""
    from_zones: tuple[str, ...] = ()
    """That facts may come from; empty for all."""
    to_zones: tuple[str, ...] = ()
    """Facts for others are ignored; empty for all."""


class LinkReport:
    """Reports each change once, however often the link retries."""

    def __init__(self, link: str, consumer: str, metrics: BoundaryMetrics) -> None:
        self._link = link
        self._consumer = consumer
        self._metrics = metrics
        self._up = metrics.link_up.labels(link)
        self._stopped = metrics.link_stopped.labels(link)
        self._frontier = metrics.link_frontier.labels(link)
        self._backlog = metrics.link_backlog.labels(link)
        self._lag = metrics.lag.labels(link)
        self._lag_high = metrics.lag_high.labels(link)
        self._missed = metrics.link_missed.labels(link)
        self.counts: Counter[str] = Counter()
        """Facts by outcome."""
        self.frontier = 0
        """The source's offset up to which everything is done."""
        self._highest_lag = 0.0
        self._waiting_since = time.time()
        self._stopped_at: StoredFact | None = None
        self._trouble: str | None = NOTHING_YET
        self._problem = ""
        self._waiting = 0
        self._gap: Gap | None = None

    def state(self) -> LinkState:
        up = self._trouble is None
        lag = max(time.time() - self._waiting_since, 0.0) if self._waiting or not up else 0.0
        return LinkState(
            name=self._link,
            state=self._word(),
            problem="" if up else self._problem,
            consumer=self._consumer,
            frontier=self.frontier,
            waiting=self._waiting,
            lag_seconds=lag,
            missed=self.counts["missed"],
        )

    def _word(self) -> Word:
        if self.is_stopped:
            return "stopped"
        if self._trouble is None:
            return "up"
        return "starting" if self._trouble == NOTHING_YET else "down"

    @property
    def is_stopped(self) -> bool:
        return self._stopped_at is not None

    def fetched(self, page: Page) -> StoredFact | None:
        """Return the fact that blocked the link, if an operator has skipped it since."""
        if page.gap is not None and page.gap != self._gap:
            self._report_gap(page.gap)
        held = self._stopped_at
        if held is not None and page.facts and page.facts[0].offset <= held.offset:
            held = None
        if held is not None:
            self._stopped_at = None
        self._waiting = len(page.facts)
        self._backlog.set(self._waiting)
        self._waiting_since = page.facts[0].appended_at_unix_ms / 1000 if page.facts else time.time()
        self._measure_lag()
        if page.facts and page.gap is None:
            self._reached(page.facts[0].offset - 1)
        return held

    def skipped(self, fact: StoredFact, decision: Skipped | None) -> None:
        _log.warning(
            "link %s continues: the fact at offset %d was skipped, and is not taken; %s",
            self._link,
            fact.offset,
            "no reason was recorded"
            if decision is None
            else f"{decision.operator} at {decision.at}: {decision.reason}",
            extra=self._about(fact, "skipped"),
        )

    def confirmed(self, offset: int, outcomes: Sequence[str] = ()) -> None:
        """Report the outcome of each fact of a page."""
        self._reached(offset)
        self._waiting = max(self._waiting - len(outcomes), 0)
        for outcome, count in Counter(outcomes).items():
            self.counts[outcome] += count
            self._metrics.link_facts.labels(self._link, outcome).inc(count)
        if _log.isEnabledFor(logging.DEBUG):
            fields = self._fields("confirmed", offset=offset)
            _log.debug("link %s has taken all facts up to %d", self._link, offset, extra=fields)

    def mark_up(self) -> None:
        self._up.set(1)
        self._stopped.set(0)
        self._stopped_at = None
        if self._trouble is not None:
            self._trouble = None
            _log.info("link %s is up", self._link, extra={"link": self._link, "outcome": "up"})

    def failed(self, error: Exception) -> None:
        self._problem = str(error) if isinstance(error, OncewardError) else f"{type(error).__name__}: {error}"
        if isinstance(error, LinkStopped):
            self._report_stop(error)
            return
        self._up.set(0)
        self._measure_lag()
        self._report_failure(error)

    def _reached(self, offset: int) -> None:
        self.frontier = max(self.frontier, offset)
        self._frontier.set(self.frontier)

    def _measure_lag(self) -> None:
        """While the source cannot be reached, the lag is the age that a fact waiting there could have."""
        lag = max(time.time() - self._waiting_since, 0.0)  # the clock of another zone may be ahead
        self._highest_lag = max(self._highest_lag, lag)
        self._lag.set(lag)
        self._lag_high.set(self._highest_lag)

    def _report_stop(self, stop: LinkStopped) -> None:
        self._up.set(0)  # the source answers, but the link makes no progress
        self._stopped.set(1)
        self._stopped_at = stop.fact
        _log.log(
            logging.ERROR if self._is_news(f"offset {stop.fact.offset}") else logging.DEBUG,
            "link %s is stopped: %s; decide with "
            "`onceward boundary skip --from SOURCE --consumer %s --offset %d --reason WHY`",
            self._link,
            stop,
            self._consumer,
            stop.fact.offset,
            extra=self._about(stop.fact, "stopped"),
        )

    def _report_failure(self, error: Exception) -> None:
        is_news = self._is_news(type(error).__name__)  # its message may change with every try
        expected = isinstance(error, OncewardError)
        _log.log(
            logging.DEBUG if not is_news else logging.WARNING if expected else logging.ERROR,
            "link %s is down, and will retry: %s",
            self._link,
            error if expected else f"{type(error).__name__}: {error}",
            exc_info=None if expected else error,
            extra=self._fields("down"),
        )

    def _is_news(self, trouble: str) -> bool:
        before, self._trouble = self._trouble, trouble
        return before != trouble

    def _report_gap(self, gap: Gap) -> None:
        self._gap = gap
        missed = gap.last_missing - gap.first_missing + 1
        self.counts["missed"] += missed
        self._missed.inc(missed)
        _log.error(
            "link %s missed facts %d to %d: they expired at the source, and are lost to this zone",
            self._link,
            gap.first_missing,
            gap.last_missing,
            extra=self._fields("gap", offset=gap.first_missing),
        )

    def _about(self, fact: StoredFact, outcome: str) -> dict[str, str | int]:
        zone = fact.envelope.from_zone
        return self._fields(outcome, offset=fact.offset, message_id=fact.message_id, zone=zone)

    def _fields(self, outcome: str, **more: str | int) -> dict[str, str | int]:
        return {"link": self._link, "consumer": self._consumer, "outcome": outcome, **more}
