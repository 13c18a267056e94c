"""The steps of a purge and its report; how the steps run differs between databases."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
from sqlalchemy import Connection

from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import PurgeStep, Records, StepTimes

STEP_SECONDS = 0.01
"""How long the work of a step should take. On SQLite, a consumer waits that long plus a commit."""
SMALLEST_STEP, FIRST_STEP, LARGEST_STEP = 20, 200, 1000
"""Rows. More would hardly be faster: enough of them share a commit."""
LARGEST_BY_AGE = 100
"""Rows of a step in the order of their age. Their ids are scattered over the key's index, so each row changes another
page, and SQLite writes all of these pages while it holds the lock."""
SHORTEST_PAUSE = 0.005
"""Seconds between two steps, at least."""


class PurgeReport(msgspec.Struct, kw_only=True):
    """What a purge removed, and what it kept and why."""

    rows: int = 0
    """Dedup rows removed."""
    attempts: int = 0
    effects: int = 0
    """Rows of the ledgers removed."""
    kept: int = 0
    """Rows on hold that were copied before their partition was dropped."""
    steps: int = 0
    longest_step: float = 0.0
    """Seconds between the begin and the commit of a step."""
    days: int = 0
    """Days to check, and how many of them are done."""
    days_done: int = 0
    dropped: list[str] = msgspec.field(default_factory=list)
    """Partitions that were dropped as a whole."""
    floors: dict[str, str] = msgspec.field(default_factory=dict)
    """The first day kept, for each purged consumer."""
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Consumers that were not purged, and why."""
    unfinished: list[str] = msgspec.field(default_factory=list)
    """What could not be done now; the next purge continues with it."""


Progress: TypeAlias = Callable[[PurgeReport], None]
"""Called after every step, with the report so far."""
Script: TypeAlias = Generator[Callable[[Connection], PurgeStep], PurgeStep, None]
"""Yields steps; each runs in its own transaction before the next is requested."""


class Target(NamedTuple):
    consumer_id: str
    contract: str
    """Its JSON text in the registry."""
    floor_day: int


class PurgePlan(NamedTuple):
    today: int
    targets: list[Target]
    """Consumers to purge."""
    others: list[Target]
    """Consumers not to purge now that were purged before, up to these days."""

    def past(self, consumer_id: str, day: int) -> Target | None:
        """Return the target whose floor is past that day, so its records are no longer needed."""
        every = [*self.targets, *self.others]
        return next(
            (each for each in every if each.consumer_id == consumer_id and day < each.floor_day), None
        )


class Pace:
    """How many rows a step checks: as many as fit into the time, learned from earlier steps.

    The commit does not count: on a slow disk it takes as long for few rows as for many; smaller steps would not help.
    """

    def __init__(self) -> None:
        self.size = FIRST_STEP

    def learn(self, seconds: float, is_full: bool) -> None:
        if is_full or seconds > STEP_SECONDS:
            wanted = self.size * min(2.0, STEP_SECONDS / max(seconds, 1e-6))
            self.size = min(LARGEST_STEP, max(SMALLEST_STEP, round(wanted)))


class Removal:
    """What the purges of both databases share."""

    def __init__(self, store: Store, report: PurgeReport, progress: Progress) -> None:
        self.store = store
        self.report = report
        self.progress = progress
        self.pace = Pace()

    def walk(self, records: Records, by_age: bool = False) -> Script:
        """Yield the steps through a range of records, in the order of their ids or of their age."""
        purge_step = self.store.purge_oldest_step if by_age else self.store.purge_step
        after: Any = ""
        while after is not None:
            size = min(self.pace.size, LARGEST_BY_AGE) if by_age else self.pace.size
            step = yield partial(purge_step, records=records, after=after, size=size)
            after = step.upto
            if records.table == "onceward_attempts":
                self.report.attempts += step.rows
            elif records.table == "onceward_effects":
                self.report.effects += step.rows
            elif records.table in ("onceward_dedup", "onceward_kept"):
                self.report.rows += step.rows

    def ledgers(self, target: Target) -> list[Records]:
        return [Records(table, *target) for table in self.store.ledgers]

    def count(self, step: PurgeStep, times: StepTimes) -> None:
        self.pace.learn(times.work, is_full=step.upto is not None)
        self.count_time(times.total)

    def count_time(self, seconds: float) -> None:
        self.report.steps += 1
        self.report.longest_step = max(self.report.longest_step, seconds)
        self.progress(self.report)

    def skip_overtaken(self, consumer_id: str) -> None:
        self.report.skipped[consumer_id] = (
            "it was put on hold or re-registered during the purge; the remaining records stay until the next purge"
        )
