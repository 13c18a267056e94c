"""Dedup records go when nothing can deliver their events any more: in small steps, while consumers run.

First the horizon of each consumer is raised, and committed: from then on an event of an earlier day is refused, whether
its record is still there or not. Then the records go. A purge that dies in between has lost nothing, and the next one
goes on where it ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from functools import partial
from math import ceil
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from sqlalchemy import Connection, Engine

from onceward.db import LockTimeoutError, sharing
from onceward.db.transaction import DbTransaction
from onceward.inbox import migrations
from onceward.inbox.contract import Contract
from onceward.inbox.exceptions import UnregisteredConsumerError
from onceward.inbox.ports import Ports
from onceward.inbox.registry import Registry
from onceward.inbox.retention import effective_days
from onceward.inbox.stores import partitions
from onceward.inbox.stores.base import Overtaken, Records, Step, Store, Times, as_date, begun
from onceward.inbox.stores.partitions import Blocked, Partition, PurgeInProgressError, State
from onceward.inbox.stores.sqlite import SqliteStore
from onceward.task.exceptions import ConfigurationError

T = TypeVar("T")

__all__ = ["Purge", "PurgeInProgressError", "PurgeReport"]

DAYS_AHEAD = 7
"""Days to come for which partitions are made beforehand."""
STEP_SECONDS = 0.01
"""How long the work of a step should take. SQLite has one write lock, so this and a commit is what a consumer waits."""
SMALLEST_STEP, FIRST_STEP, LARGEST_STEP = 20, 200, 1000
"""Rows. More would hardly be faster: a commit is spread over enough of them."""
SHORTEST_PAUSE = 0.005
PAUSE = 2
"""Seconds between two steps on SQLite at least, and times the length of the step. Whoever waits for the lock looks for
it only now and then, and should find it free more often than not."""
PROBE_PAUSE = 0.001
"""Seconds between two looks for SQLite's lock. SQLite itself looks ever less often, and a consumer that has work all
the time leaves it free for moments only: a purge would hardly ever get it."""
LOCK_PATIENCE = 60.0
"""Seconds in which a purge of SQLite looks for the lock in vain before it gives up."""

_RETENTION = ("retention", "dedup_days", "source_days", "dead_letter_days", "replay_days")


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


class Purge:
    def __init__(self, store: Store, ports: Ports, registry: Registry) -> None:
        self._store = store
        self._ports = ports
        self._registry = registry

    async def run(self, consumer_id: str | None, progress: Progress = lambda _: None) -> PurgeReport:
        """Purge one consumer, or all that are registered."""
        report = PurgeReport()
        plan = await self._patiently(self._begin, consumer_id, report)
        if isinstance(self._store, SqliteStore):
            await _RowPurge(self._store, self._ports, report, progress).run(plan)
        else:
            await self._ports.outside(_DayPurge(self._store, plan, report, progress).run)
        return report

    async def _patiently(self, operation: Callable[..., T], *args: Any) -> T:
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                return await self._ports.transact(operation, *args)
            except LockTimeoutError:
                if time.monotonic() > until:
                    raise

    def _begin(self, transaction: DbTransaction, wanted: str | None, report: PurgeReport) -> Plan:
        """Decide what goes, and raise the horizons. Nothing is removed before this is committed."""
        store = self._store
        migrations.check(transaction, store)
        registered = {row["consumer_id"]: str(row["contract"]) for row in store.registrations(transaction)}
        if wanted is not None and wanted not in registered:
            known = ", ".join(registered) or "none"
            raise UnregisteredConsumerError(
                f"consumer {wanted!r} is not registered (registered: {known}), so how long its records are to be kept "
                "is not known; nothing was removed"
            )
        plan = Plan(store.today(transaction), [], [])
        horizons = store.horizons(transaction)
        on_hold = {row["consumer_id"] for row in store.holds(transaction) if row["tracking_id"] == ""}
        for consumer_id, contract in registered.items():
            is_wanted = wanted in (None, consumer_id)
            floor = _floor(consumer_id, contract, plan.today, on_hold)
            if isinstance(floor, int):
                target = Target(consumer_id, contract, floor)
                if is_wanted:
                    store.raise_horizon(transaction, consumer_id, floor)
                    plan.targets.append(target)
                    report.floors[consumer_id] = as_date(floor)
                elif consumer_id in horizons:
                    plan.others.append(target._replace(floor_day=min(floor, horizons[consumer_id])))
            elif is_wanted:
                report.skipped[consumer_id] = floor
        return plan

    async def hold(self, consumer_id: str, tracking_id: str | None, reason: str, operator: str) -> bool:
        if not reason.strip() or not operator.strip():
            raise ConfigurationError("a hold needs a reason and the name of an operator")
        known = [row["consumer_id"] for row in await self._registry.consumers()]
        if consumer_id not in known:
            raise ConfigurationError(
                f"there is no consumer {consumer_id!r} to hold anything of; registered: {', '.join(known) or 'none'}"
            )
        return await self._ports.transact(self._store.hold, consumer_id, tracking_id or "", reason, operator)

    async def release(self, consumer_id: str, tracking_id: str | None) -> bool:
        return await self._ports.transact(self._store.release, consumer_id, tracking_id or "")


def _floor(consumer_id: str, contract: str, today: int, on_hold: set[str]) -> int | str:
    """The first day that is kept; or the reason why everything is."""
    if consumer_id in on_hold:
        return "it is on hold"
    try:
        days = effective_days(registered_contract(json.loads(contract)))
    except (ConfigurationError, ValueError, TypeError, KeyError) as error:
        return f"its registered contract is not valid, register it anew: {error}"
    if days is None:
        return "its retention is legal-hold; to release it, register it with another class"
    return today - ceil(days)  # the last event of a day is as old as `days` only when the day after it is


def registered_contract(fields: dict[str, Any]) -> Contract:
    """What says how long; checked again, since whoever wrote the row need not have checked it."""
    return Contract(
        consumer_id=fields["consumer_id"],
        event_types=fields["event_types"],
        owner_team=fields["owner_team"],
        idempotency_mechanism=fields["idempotency_mechanism"],
        **{name: fields[name] for name in _RETENTION if name in fields},
    )


class _Removal:
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


class _RowPurge(_Removal):
    """SQLite: rows, a few at a time, with pauses in which others get the lock."""

    store: SqliteStore

    def __init__(self, store: SqliteStore, ports: Ports, report: PurgeReport, progress: Progress) -> None:
        super().__init__(store, report, progress)
        self._ports = ports
        self._engine = _plain(ports)

    async def run(self, plan: Plan) -> None:
        days = {target: (await self._step(partial(self._days_below, target)))[0] for target in plan.targets}
        self.report.days = sum(map(len, days.values()))
        for target in plan.targets:
            try:
                for day in days[target]:
                    await self._drive(self.walk(Records("onceward_dedup", *target, day=day)))
                    self.report.days_done += 1
                for records in self.ledgers(target):
                    await self._drive(self.walk(records))
            except Overtaken:
                self.overtaken(target.consumer_id)
        await self._give_back_space()

    def _days_below(self, target: Target, connection: Connection) -> list[int]:
        return self.store.days_below(connection, target.consumer_id, target.floor_day)

    async def _drive(self, script: Script) -> None:
        operation = next(script)
        while True:
            step, times = await self._step(operation)
            self.count(step, times)
            try:
                operation = script.send(step)
            except StopIteration:
                return

    async def _step(self, operation: Callable[[Connection], T]) -> tuple[T, Times]:
        """In one transaction, and a pause. The time is that in which nobody else can write."""
        until = time.monotonic() + LOCK_PATIENCE
        while (done := await self._if_free(operation)) is None:
            if time.monotonic() > until:
                raise LockTimeoutError(
                    f"others kept the database locked for {LOCK_PATIENCE:g} s; what is gone is gone, and the next "
                    "purge goes on with the rest"
                )
            await self._ports.sleep(PROBE_PAUSE)
        await self._ports.sleep(max(SHORTEST_PAUSE, PAUSE * done[1].total))
        return done

    async def _if_free(self, operation: Callable[[Connection], T]) -> tuple[T, Times] | None:
        shared = sharing.reserve(self._engine)
        try:
            return await self._ports.outside(self.store.if_free, operation)
        finally:
            sharing.free(shared)

    async def _give_back_space(self) -> None:
        pace, before = Pace(), -1
        while True:
            give_back = partial(self.store.give_back_space, pages=pace.size)
            left, times = await self._step(give_back)
            if left in (0, before):
                return
            before = left
            pace.learn(times.work, is_full=True)
            self.count_time(times.total)


def _plain(ports: Any) -> Engine:
    """The engine of either kind of ports; that of asyncio has it inside."""
    engine: Engine = getattr(ports.engine, "sync_engine", ports.engine)
    return engine


class _DayPurge(_Removal):
    """PostgreSQL: whole days where nobody needs them any more, rows where somebody still does."""

    def __init__(self, store: Store, plan: Plan, report: PurgeReport, progress: Progress) -> None:
        super().__init__(store, report, progress)
        self._plan = plan

    def run(self, connection: Connection) -> None:
        with partitions.only_purger(connection):
            try:
                with partitions.or_blocked(connection, "the purge stopped before its end"):
                    self._run(connection)
            except Blocked as blocked:
                self.report.unfinished.append(str(blocked))

    def _run(self, connection: Connection) -> None:
        self._make_days(connection)
        partitions.await_old_snapshots(connection)
        self._remove_days(connection)
        for target in self._plan.targets:
            for records in self.ledgers(target):
                self._walk(connection, records)

    def _make_days(self, connection: Connection) -> None:
        every = partitions.partitions(connection)
        there = {each.day for each in every if each.state is not State.DETACHED}
        for day in range(self._plan.today, self._plan.today + DAYS_AHEAD + 1):
            if day not in there:
                partitions.make(connection, day)

    def _remove_days(self, connection: Connection) -> None:
        """What an earlier purge has begun comes first: only one partition at a time can be on its way out."""
        floor = max((target.floor_day for target in self._plan.targets), default=0)
        every = partitions.partitions(connection)
        begun_before = [each for each in every if each.state is not State.ATTACHED]
        old = begun_before + [each for each in every if each.state is State.ATTACHED and each.day < floor]
        self.report.days = len(old)
        try:
            for partition in old:
                self._remove_day(connection, partition)
                self.report.days_done += 1
                self.progress(self.report)
        except Blocked as blocked:
            self.report.unfinished.append(str(blocked))

    def _remove_day(self, connection: Connection, partition: Partition) -> None:
        is_needed = self._is_needed(connection, partition)
        if partition.state is State.ATTACHED and is_needed:
            self._remove_rows(connection, partition)
            return
        if not is_needed:
            # Before they are out of sight: who looks for a row on hold must find it all the time.
            with begun(connection, partitions.READ_COMMITTED):
                partitions.keep_held(connection, partition)
        if partition.state is not State.DETACHED:
            partitions.detach(connection, partition)
        dropped = partitions.drop(
            connection,
            partition,
            self.store.freeze_holds,
            lambda each: self._is_needed(connection, each),
        )
        if dropped is None:
            self._remove_rows(connection, partition)
            return
        self.report.dropped.append(partition.name)
        self.report.rows += dropped.rows - dropped.kept
        self.report.kept += dropped.kept
        self.count_time(dropped.seconds)

    def _is_needed(self, connection: Connection, partition: Partition) -> bool:
        """Whether it has rows of anybody who is not past that day, or not known to be."""
        for consumer_id in partitions.consumers_in(connection, partition):
            past = self._plan.past(consumer_id, partition.day)
            if past is None or not self.store.may_purge(connection, consumer_id, past.contract):
                return True
        return False

    def _remove_rows(self, connection: Connection, partition: Partition) -> None:
        there = partitions.consumers_in(connection, partition)
        for target in self._plan.targets:
            if target.consumer_id in there and partition.day < target.floor_day:
                self._walk(connection, Records("onceward_dedup", *target, day=partition.day))

    def _walk(self, connection: Connection, records: Records) -> None:
        script = self.walk(records)
        operation = next(script)
        try:
            while True:
                began = time.perf_counter()
                with begun(connection, partitions.READ_COMMITTED):
                    step = operation(connection)
                    worked = time.perf_counter()
                total = time.perf_counter() - began
                self.count(step, Times(worked - began, total))
                operation = script.send(step)
                # Nobody waits for a lock of ours; but a purge should leave others the better part of the machine.
                connection.exec_driver_sql(f"SELECT pg_sleep({max(SHORTEST_PAUSE, total):.3f})")
        except StopIteration:
            return
        except Overtaken:
            self.overtaken(records.consumer_id)
