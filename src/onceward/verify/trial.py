"""What scenarios share: runs in children, the oracle, and findings about differences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import URL

from onceward.task.work import OutcomeStatus
from onceward.transaction import Transaction
from onceward.verify.children import PREPARING, ChildExit, Watchdog, run_at_once, run_in_child
from onceward.verify.databases import Databases
from onceward.verify.faults import Fault
from onceward.verify.plan import VerificationPlan
from onceward.verify.report import Finding
from onceward.verify.rows import schema, tables
from onceward.verify.stage import Delivery, Stage
from onceward.verify.watch import background, blockade, intrusions

Act = Callable[[Stage], Any]
MORE_CLEAN = 3
"""Clean deliveries that show what is left to chance."""
DIFFERS = "the database differs from that of one clean delivery"


_KEYS = {
    "order_by": "after a restart, or in another process, it does not wait for the events of its first key",
    "Limit(by=…)": "processes count its starts by different keys",
}


class NotApplicable(Exception):
    """The scenario does not apply; the message says why."""


class NotChecked(Exception):
    """The scenario applies but cannot run here; the message says why."""


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

    def __init__(self, plan: VerificationPlan, databases: Databases, found: list[schema.Table]) -> None:
        self.plan = plan
        self.databases = databases
        self.tables = found
        self.chance = random.Random(plan.seed)
        self.oracle: tables.Rows = {}
        """The rows after one clean delivery of each event."""
        self.deliveries: list[Delivery] = []
        """The deliveries that led to the oracle."""
        self.again: list[Delivery] = []
        """Those of a second clean delivery."""
        self.changes: dict[str, list[str]] = {}
        """The tables that each of these events has changed, by its id."""
        self.intrusions: list[intrusions.Intrusion] = []
        """Those of all runs so far."""
        self.blocked: list[blockade.BlockedCall] = []
        """Outside calls that were not made."""

    # ── runs ────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, act: Act, database: SharedDatabase | None = None) -> Run:
        """Run in a child, on a database of its own or on a shared one."""
        return self._run_of(run_in_child(self._work(act, database), self.plan.options.timeout))

    def new_database(self) -> SharedDatabase:
        return SharedDatabase(self.databases.next_url())

    def perform_until_killed(self, act: Act, database: SharedDatabase) -> bool:
        """Run in a child that a fault should kill; return whether it was killed."""
        ended = run_in_child(self._work(act, database), self.plan.options.timeout)
        if ended.was_killed:
            return True
        self._run_of(ended)
        return False

    def perform_at_once(self, acts: Sequence[Act], database: SharedDatabase) -> list[Any]:
        """Run each in a child of its own, all at once; return their values."""
        self.perform(lambda stage: None, database)  # makes it fresh before the others use it
        works = [self._work(act, database) for act in acts]
        ended = run_at_once(works, self.plan.options.timeout)
        return [self._run_of(each).value for each in ended]

    def on_fresh_database(self, stage: Stage, act: Act) -> tuple[Any, tables.Rows]:
        """Run in the process of `stage`, on another, fresh database."""
        url = self.databases.next_url()
        stage.watchdog.pet("preparing", PREPARING)
        stage.disconnect()
        with blockade.lifted():
            self.databases.renew(url)
        with Stage(self.plan, url, stage.watchdog) as other:
            value = act(other)
            return value, other.rows(self.tables)

    def rows_in(self, database: SharedDatabase) -> tables.Rows:
        return self.perform(lambda stage: None, database).rows

    def _work(self, act: Act, database: SharedDatabase | None) -> Callable[[Watchdog], Any]:
        used = database or self.new_database()
        stale = used.take()

        def work(watchdog: Watchdog) -> Any:
            if stale:
                self.databases.renew(used.url)
            with Stage(self.plan, used.url, watchdog) as stage:
                value = act(stage)
                watchdog.pet("reading the database", PREPARING)
                rows = stage.rows(self.tables)
                background.finish()
                return value, rows, self.tables, intrusions.seen, blockade.seen

        return work

    def _run_of(self, ended: ChildExit) -> Run:
        value, *observed = ended.value()
        return Run(value, self.learn(*observed))

    def learn(
        self,
        rows: tables.Rows,
        found: list[schema.Table],
        seen: list[intrusions.Intrusion],
        blocked: list[blockade.BlockedCall],
    ) -> tables.Rows:
        """Take over what another process has observed; return its rows."""
        self.tables += [table for table in found if table not in self.tables]
        self.intrusions += [each for each in seen if each not in self.intrusions]
        self.blocked += [each for each in blocked if each not in self.blocked]
        return rows

    # ── findings ────────────────────────────────────────────────────────────────────────────────────────

    def settle_doubts(self, again: tables.Rows) -> tables.Rows:
        """Compare less from now on, if these rows of a second clean delivery show that it changes by itself. Returns
        what is compared of them."""
        if self.plan.options.exclude is not None:
            return again
        before = list(self.tables)
        self.tables[:] = tables.without_unsteady(self.oracle, again, before)
        self.oracle, again = (tables.project(rows, before, self.tables) for rows in (self.oracle, again))
        self.tables[:] = tables.without_chance(self.oracle, again, self.tables)
        return again

    def differences(
        self, rows: tables.Rows, oracle: tables.Rows | None = None, *, references: bool = False
    ) -> list[str]:
        expected = self.oracle if oracle is None else oracle
        return tables.differences(
            expected, rows, self.tables, self.plan.options.exclude, references=references
        )

    def differences_in_order(self, rows: tables.Rows) -> list[str]:
        """Differences after events that came in the order of the oracle, so each must have found the same rows.

        Which row an event takes may still be left to chance, and two clean deliveries may have agreed by chance.
        """
        lines = self.differences(rows, references=True)
        if lines and not self.differences(rows):
            for _ in range(MORE_CLEAN):
                again = deliver_cleanly(self, self.plan.events)[1]
                self.tables[:] = tables.without_chance(self.oracle, again, self.tables)
            lines = self.differences(rows, references=True)
        return lines

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


def deliver_cleanly(trial: Trial, events: Sequence[Transaction]) -> tuple[list[Delivery], tables.Rows]:
    database = trial.new_database()
    deliveries: list[Delivery] = []
    rows: tables.Rows = {}
    for event in events:
        run = trial.perform(lambda stage, event=event: deliver_all(stage, [event]), database)  # type: ignore[misc]
        deliveries += run.value
        rows = run.rows
    return deliveries, rows


def unsettled(story: str, deliveries: Sequence[Delivery]) -> list[Finding]:
    """Events whose last delivery did not succeed."""
    last = {each.event: each for each in deliveries}
    return [
        Finding(f"{story}, event {each.event!r} {_ended(each)}: {each.error or 'no reason given'}")
        for each in last.values()
        if not each.succeeded
    ]


def other_keys(*deliveries: Sequence[Delivery]) -> list[Finding]:
    """Events whose key is another one in these deliveries, the first for each function."""
    known: dict[tuple[str, str], str | None] = {}
    found: dict[str, Finding] = {}
    for each in (each for some in deliveries for each in some):
        for name, key in (pair for keys in each.keys for pair in keys.items()):
            first = known.setdefault((name, each.event), key)
            if key != first:
                text = (
                    f"{name} gives event {each.event!r} the key {_key(first)} and then the key {_key(key)}, so "
                    f"{_KEYS[name]}. Make the key only of what the payload says: not of hash(), the time, chance, or "
                    "a counter, and leave the payload as it is"
                )
                found.setdefault(name, Finding(text))
    return list(found.values())


def _key(key: str | None) -> str:
    return "none" if key is None else repr(key)


def _ended(delivery: Delivery) -> str:
    return "failed" if delivery.status is OutcomeStatus.FAILED else f"was {delivery.status}"


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
