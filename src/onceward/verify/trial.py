"""What scenarios share: runs in children, the oracle, and findings about differences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import URL

from onceward.transaction import Transaction
from onceward.verify import intrusions, tables
from onceward.verify.children import PREPARING, ChildExit, Watchdog, run_at_once, run_in_child
from onceward.verify.databases import Databases
from onceward.verify.faults import Fault
from onceward.verify.plan import VerificationPlan
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery, Stage

Act = Callable[[Stage], Any]
DIFFERS = "the database differs from that of one clean delivery"


class NotApplicable(Exception):
    """The scenario does not apply; the message says why."""


class Assessment(msgspec.Struct, frozen=True):
    """What a scenario found, and a note of what it tried."""

    findings: list[Finding]
    note: str = ""


class Run(msgspec.Struct, frozen=True):
    """What a child returned, and the rows it left."""

    value: Any
    rows: tables.Rows


class SharedDatabase:
    """A database that several children use, one after another or at once. It is fresh for the first."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self.is_fresh = False

    def take(self) -> bool:
        """Whether the caller must make it fresh first."""
        stale, self.is_fresh = not self.is_fresh, True
        return stale


class Trial:
    """One verification, as its scenarios see it."""

    def __init__(self, plan: VerificationPlan, databases: Databases, found: list[tables.Table]) -> None:
        self.plan = plan
        self.databases = databases
        self.tables = found
        self.chance = random.Random(plan.seed)
        self.oracle: tables.Rows = {}
        """The rows after one clean delivery of each event."""
        self.deliveries: list[Delivery] = []
        """The deliveries that led to the oracle."""
        self.intrusions: list[intrusions.Intrusion] = []
        """Those of all runs so far."""

    # ── runs ────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, act: Act, database: SharedDatabase | None = None, *, watched: bool = True) -> Run:
        """Run in a child, on a database of its own or on a shared one.

        `watched`: note outside calls, which requires that only one delivery runs at a time.
        """
        return self._run_of(
            run_in_child(self._work(act, database, watched=watched), self.plan.options.timeout)
        )

    def new_database(self) -> SharedDatabase:
        return SharedDatabase(self.databases.next_url())

    def perform_until_killed(self, act: Act, database: SharedDatabase) -> bool:
        """Run in a child that a fault should kill; return whether it was killed."""
        ended = run_in_child(self._work(act, database), self.plan.options.timeout)
        if ended.was_killed:
            return True
        self._run_of(ended)
        return False

    def perform_at_once(self, act: Act, processes: int, database: SharedDatabase) -> list[Any]:
        """Run in several children at once; return their values."""
        self.perform(lambda stage: None, database)  # makes it fresh before the others use it
        work = self._work(act, database, watched=False)
        ended = run_at_once([work] * processes, self.plan.options.timeout)
        return [self._run_of(each).value for each in ended]

    def on_fresh_database(self, stage: Stage, act: Act) -> tuple[Any, tables.Rows]:
        """Run in the process of `stage`, on another, fresh database."""
        url = self.databases.next_url()
        stage.watchdog.pet("preparing", PREPARING)
        stage.disconnect()
        self.databases.renew(url)
        with Stage(self.plan, url, stage.watchdog) as other:
            value = act(other)
            return value, other.rows(self.tables)

    def rows_in(self, database: SharedDatabase) -> tables.Rows:
        return self.perform(lambda stage: None, database).rows

    def _work(
        self, act: Act, database: SharedDatabase | None, *, watched: bool = True
    ) -> Callable[[Watchdog], Any]:
        used = database or self.new_database()
        stale = used.take()

        def work(watchdog: Watchdog) -> Any:
            if stale:
                self.databases.renew(used.url)
            with Stage(self.plan, used.url, watchdog) as stage:
                if watched:
                    stage.watch()
                value = act(stage)
                watchdog.pet("reading the database", PREPARING)
                return value, stage.rows(self.tables), intrusions.seen if watched else []

        return work

    def _run_of(self, ended: ChildExit) -> Run:
        value, rows, seen = ended.value()
        self.intrusions += [each for each in seen if each not in self.intrusions]
        return Run(value, rows)

    # ── findings ────────────────────────────────────────────────────────────────────────────────────────

    def differences(self, rows: tables.Rows, oracle: tables.Rows | None = None) -> list[str]:
        expected = self.oracle if oracle is None else oracle
        return tables.differences(expected, rows, self.tables, self.plan.options.exclude)

    def compare(self, story: str, rows: tables.Rows, oracle: tables.Rows | None = None) -> list[Finding]:
        """A finding if the rows are not those of the oracle."""
        lines = self.differences(rows, oracle)
        return [Finding(f"{story}, {DIFFERS}", tuple(lines))] if lines else []

    def most(self, attribute: str) -> int:
        """The most writes or effects in one delivery of the oracle."""
        return max((getattr(each, attribute) for each in self.deliveries), default=0)


def deliver_all(
    stage: Stage, events: Sequence[Transaction], fault: Fault | None = None, task: Any = None
) -> list[Delivery]:
    """Deliver the events one after another to one instance, each until it is settled."""
    task = task or stage.instance()
    return [delivery for event in events for delivery in stage.settle(task, event, fault)]


def unsettled(story: str, deliveries: Sequence[Delivery]) -> list[Finding]:
    """Events whose last delivery did not succeed."""
    last = {each.event: each for each in deliveries}
    return [
        Finding(f"{story}, event {each.event!r} was {each.status}: {each.error or 'no reason given'}")
        for each in last.values()
        if not each.succeeded
    ]


def not_done_once(story: str, deliveries: Sequence[Delivery]) -> list[Finding]:
    """Events that were done more than once, or never."""
    done = {each.event: 0 for each in deliveries}
    for each in deliveries:
        done[each.event] += each.succeeded and not each.duplicate
    return [
        Finding(f"{story}, event {event!r} was done {times} times instead of once")
        for event, times in done.items()
        if times != 1
    ]
