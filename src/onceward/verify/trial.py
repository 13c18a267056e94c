"""What scenarios have in common: runs in children, the oracle, and how a difference is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import URL

from onceward.transaction import Transaction
from onceward.verify import intrusions, tables
from onceward.verify.children import PREPARING, Ended, Watchdog, at_once, in_child
from onceward.verify.databases import Databases
from onceward.verify.faults import Fault
from onceward.verify.plan import Plan
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery, Stage

Act = Callable[[Stage], Any]


class NotApplicable(Exception):
    """There is nothing to try, and why."""


class Tried(msgspec.Struct, frozen=True):
    """A scenario's outcome: what is wrong, and what was tried."""

    findings: list[Finding]
    note: str = ""


class Run(msgspec.Struct, frozen=True):
    """What a child came to."""

    value: Any
    rows: tables.Rows


class Place:
    """A database that several children use, one after another or at once. The first finds it fresh."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self.is_fresh = False

    def take(self) -> bool:
        """Whether it has still to be made fresh."""
        stale, self.is_fresh = not self.is_fresh, True
        return stale


class Trial:
    """One verification, as its scenarios see it."""

    def __init__(self, plan: Plan, databases: Databases, found: list[tables.Table]) -> None:
        self.plan = plan
        self.databases = databases
        self.tables = found
        self.chance = random.Random(plan.seed)
        self.oracle: tables.Rows = {}
        """The rows after each event was delivered once, without any trouble."""
        self.deliveries: list[Delivery] = []
        """Those of the oracle."""
        self.sights: list[intrusions.Sight] = []
        """What was done at the wrong time, in all runs so far."""

    # ── runs ────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, act: Act, place: Place | None = None, *, watched: bool = True) -> Run:
        """In a child; on a database of its own, or on one that others use, too.

        It is watched what is done when, which only makes sense while one thing is done at a time.
        """
        return self._run(in_child(self._work(act, place, watched=watched), self.plan.asked.timeout))

    def new_place(self) -> Place:
        return Place(self.databases.place())

    def doom(self, act: Act, place: Place) -> bool:
        """In a child that is to be killed; whether it was."""
        ended = in_child(self._work(act, place), self.plan.asked.timeout)
        if ended.was_killed:
            return True
        self._run(ended)
        return False

    def perform_at_once(self, act: Act, processes: int, place: Place) -> list[Any]:
        self.perform(lambda stage: None, place)  # which makes it fresh, and the others only use it
        work = self._work(act, place, watched=False)
        ended = at_once([work] * processes, self.plan.asked.timeout)
        return [self._run(each).value for each in ended]

    def on_another(self, stage: Stage, act: Act) -> tuple[Any, tables.Rows]:
        """In the same process as a stage, on a fresh database of its own."""
        place = self.databases.place()
        stage.watchdog.pet("making ready", PREPARING)
        stage.let_go()
        self.databases.renew(place)
        with Stage(self.plan, place, stage.watchdog) as other:
            value = act(other)
            return value, other.rows(self.tables)

    def rows_at(self, place: Place) -> tables.Rows:
        return self.perform(lambda stage: None, place).rows

    def _work(self, act: Act, place: Place | None, *, watched: bool = True) -> Callable[[Watchdog], Any]:
        at = place or self.new_place()
        stale = at.take()

        def work(watchdog: Watchdog) -> Any:
            if stale:
                self.databases.renew(at.url)
            with Stage(self.plan, at.url, watchdog) as stage:
                if watched:
                    stage.watch()
                value = act(stage)
                watchdog.pet("reading the database", PREPARING)
                return value, stage.rows(self.tables), intrusions.sights if watched else []

        return work

    def _run(self, ended: Ended) -> Run:
        value, rows, sights = ended.value()
        self.sights += [each for each in sights if each not in self.sights]
        return Run(value, rows)

    # ── what is wrong ───────────────────────────────────────────────────────────────────────────────────

    def differences(self, rows: tables.Rows, oracle: tables.Rows | None = None) -> list[str]:
        expected = self.oracle if oracle is None else oracle
        return tables.differences(expected, rows, self.tables, self.plan.asked.exclude)

    def compare(self, story: str, rows: tables.Rows, oracle: tables.Rows | None = None) -> list[Finding]:
        told = self.differences(rows, oracle)
        return (
            [Finding(f"{story}, the database is not as after one clean delivery", tuple(told))]
            if told
            else []
        )

    def most(self, attribute: str) -> int:
        """Of writes or effects, in one delivery of the oracle."""
        return max((getattr(each, attribute) for each in self.deliveries), default=0)


def deliver_all(
    stage: Stage, events: Sequence[Transaction], fault: Fault | None = None, task: Any = None
) -> list[Delivery]:
    """One after another, to one instance, each until it is settled."""
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


def done_twice(story: str, deliveries: Sequence[Delivery]) -> list[Finding]:
    """Events that were done more than once, or never."""
    done = {each.event: 0 for each in deliveries}
    for each in deliveries:
        done[each.event] += each.succeeded and not each.duplicate
    return [
        Finding(f"{story}, event {event!r} was done {times} times, and not once")
        for event, times in done.items()
        if times != 1
    ]
