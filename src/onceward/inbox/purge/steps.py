"""What a purge removes, step by step, and its report; how the steps are made is each database's own matter."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec
from sqlalchemy import Connection

from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Records, Step, Times

STEP_SECONDS = 0.01
"""How long the work of a step should take. SQLite has one write lock, so this and a commit is what a consumer waits."""
SMALLEST_STEP, FIRST_STEP, LARGEST_STEP = 20, 200, 1000
"""Rows. More would hardly be faster: a commit is spread over enough of them."""
SHORTEST_PAUSE = 0.005
"""Seconds between two steps, at least."""


class PurgeReport(msgspec.Struct, kw_only=True):
    """What a purge has removed, and what it left and why."""

    rows: int = 0
    """Dedup rows that are gone."""
    attempts: int = 0
    effects: int = 0
    """Rows of the ledgers that are gone."""
    kept: int = 0
    """Rows on hold that were copied before their partition was dropped."""
    steps: int = 0
    longest_step: float = 0.0
    """Seconds between the begin and the commit of a step."""
    days: int = 0
    """Days with something to look at, and how many of them are through."""
    days_done: int = 0
    dropped: list[str] = msgspec.field(default_factory=list)
    """Partitions that went as a whole."""
    floors: dict[str, str] = msgspec.field(default_factory=dict)
    """The first day that is kept, for each consumer that was purged."""
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Consumers that were not purged, and why not."""
    unfinished: list[str] = msgspec.field(default_factory=list)
    """What could not be done for now. The next purge goes on with it."""


Progress: TypeAlias = Callable[[PurgeReport], None]
"""Called after every step, with the report so far."""
Script: TypeAlias = Generator[Callable[[Connection], Step], Step, None]
"""Steps, each of which is done in a transaction of its own before the next is asked for."""


class Target(NamedTuple):
    consumer_id: str
    contract: str
    """Its text in the registry."""
    floor_day: int


class Plan(NamedTuple):
    today: int
    targets: list[Target]
    """To be purged."""
    others: list[Target]
    """Not to be purged now, but purged before, up to these days."""

    def past(self, consumer_id: str, day: int) -> Target | None:
        """The entry by which records of that day are not needed any more."""
        every = [*self.targets, *self.others]
        return next(
            (each for each in every if each.consumer_id == consumer_id and day < each.floor_day), None
        )


class Pace:
    """How many rows a step looks at: as many as fit into the time, learned from the steps before.

    The commit does not count: on a slow disk it takes its time for few rows as for many, and steps would only become
    more.
    """

    def __init__(self) -> None:
        self.size = FIRST_STEP

    def learn(self, seconds: float, is_full: bool) -> None:
        if is_full or seconds > STEP_SECONDS:
            wanted = self.size * min(2.0, STEP_SECONDS / max(seconds, 1e-6))
            self.size = min(LARGEST_STEP, max(SMALLEST_STEP, round(wanted)))


class Removal:
    """What both kinds have."""

    def __init__(self, store: Store, report: PurgeReport, progress: Progress) -> None:
        self.store = store
        self.report = report
        self.progress = progress
        self.pace = Pace()

    def walk(self, records: Records) -> Script:
        """From one end of a stretch to the other."""
        after: str | None = ""
        while after is not None:
            purge_step = self.store.purge_step
            step = yield partial(purge_step, records=records, after=after, size=self.pace.size)
            after = step.upto
            if records.table == "onceward_attempts":
                self.report.attempts += step.rows
            elif records.table == "onceward_effects":
                self.report.effects += step.rows
            else:
                self.report.rows += step.rows

    def ledgers(self, target: Target) -> list[Records]:
        return [Records(table, *target) for table in self.store.ledgers]

    def count(self, step: Step, times: Times) -> None:
        self.pace.learn(times.work, is_full=step.upto is not None)
        self.count_time(times.total)

    def count_time(self, seconds: float) -> None:
        self.report.steps += 1
        self.report.longest_step = max(self.report.longest_step, seconds)
        self.progress(self.report)

    def overtaken(self, consumer_id: str) -> None:
        self.report.skipped[consumer_id] = (
            "it was put on hold or registered anew while it was purged; what is left stays until the next purge"
        )
